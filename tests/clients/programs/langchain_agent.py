"""LangChain's `create_agent` with `langchain-openai` (Chat Completions or Responses) or `langchain-anthropic`."""

from conversation import DIALECT, INSTRUCTIONS, MODEL, QUESTIONS, STREAMS, add, tell, text_of
from langchain.agents import create_agent

ROLES = {"human": "user", "ai": "assistant", "tool": "tool"}


def model_of(dialect):
    if dialect == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=MODEL, max_tokens=512)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, use_responses_api=dialect == "responses")


def main():
    agent = create_agent(model_of(DIALECT), tools=[add], system_prompt=INSTRUCTIONS)
    messages, pieces = [], 0
    for question in QUESTIONS:
        state = {"messages": [*messages, {"role": "user", "content": question}]}
        if STREAMS:
            for mode, part in agent.stream(state, stream_mode=["messages", "values"]):
                pieces += mode == "messages"
                messages = part["messages"] if mode == "values" else messages
        else:
            messages = agent.invoke(state)["messages"]
    tell([["system", INSTRUCTIONS, []], *map(view_of, messages)], pieces if STREAMS else None)


def view_of(message):
    calls = [[call["name"], call["args"]] for call in getattr(message, "tool_calls", ())]
    return [ROLES[message.type], text_of(message.content), calls]


main()
