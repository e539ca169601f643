"""What the programs of google-adk share: its models, and a session in its runner."""

from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.runners import InMemoryRunner
from google.genai import types

MODEL = "scripted"


def model_of(dialect):
    if dialect == "messages":
        from google.adk.models.anthropic_llm import AnthropicLlm

        return AnthropicLlm(model=MODEL)
    from google.adk.models.lite_llm import LiteLlm

    return LiteLlm(model=f"openai/{MODEL}")


async def said(agent, questions, *, streams):
    """The final answer to each question, asked in one session."""
    runner = InMemoryRunner(agent=agent, app_name="trial")
    session = await runner.session_service.create_session(app_name="trial", user_id="u")
    config = RunConfig(streaming_mode=StreamingMode.SSE if streams else StreamingMode.NONE)
    answers = []
    for question in questions:
        message = types.Content(role="user", parts=[types.Part(text=question)])
        events = runner.run_async(user_id="u", session_id=session.id, new_message=message, run_config=config)
        final = [event async for event in events if event.is_final_response() and event.content]
        answers.append("".join(part.text or "" for part in final[-1].content.parts))
    await runner.close()
    return answers
