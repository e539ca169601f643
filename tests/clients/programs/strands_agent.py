"""The `strands-agents` package over Chat Completions, Responses or Messages, whichever the second argument names."""

from conversation import DIALECT, INSTRUCTIONS, MODEL, QUESTIONS, STREAMS, add, tell
from strands import Agent, tool


def model_of(dialect):
    if dialect == "messages":
        from strands.models.anthropic import AnthropicModel

        return AnthropicModel(model_id=MODEL, max_tokens=512)
    if dialect == "responses":
        from strands.models.openai_responses import OpenAIResponsesModel

        return OpenAIResponsesModel(model_id=MODEL)
    from strands.models.openai import OpenAIModel

    return OpenAIModel(model_id=MODEL, stream=STREAMS)


def main():
    pieces = []
    agent = Agent(
        model=model_of(DIALECT),
        system_prompt=INSTRUCTIONS,
        tools=[tool(add)],
        callback_handler=lambda **event: pieces.append(1) if "data" in event else None,
    )
    for question in QUESTIONS:
        agent(question)
    entries = [entry for message in agent.messages for entry in view_of(message)]
    tell([["system", INSTRUCTIONS, []], *entries], len(pieces))


def view_of(message):
    blocks = message["content"]
    results = [block["toolResult"] for block in blocks if "toolResult" in block]
    if results:
        return [["tool", "".join(part["text"] for part in result["content"]), []] for result in results]
    calls = [[block["toolUse"]["name"], block["toolUse"]["input"]] for block in blocks if "toolUse" in block]
    return [[message["role"], "".join(block.get("text", "") for block in blocks), calls]]


main()
