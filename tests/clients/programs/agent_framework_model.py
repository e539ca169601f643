"""The clients of agent-framework that speak each API."""

MODEL = "scripted"


def client_of(dialect):
    if dialect == "messages":
        from agent_framework.anthropic import AnthropicClient

        return AnthropicClient(model=MODEL)
    from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

    return {"chat": OpenAIChatCompletionClient, "responses": OpenAIChatClient}[dialect](model=MODEL)
