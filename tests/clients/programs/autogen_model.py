"""The clients of AutoGen that speak each API."""

MODEL = "scripted"
INFO = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}


def client_of(dialect):
    if dialect == "messages":
        from autogen_ext.models.anthropic import AnthropicChatCompletionClient

        return AnthropicChatCompletionClient(model=MODEL, model_info=INFO)
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    return OpenAIChatCompletionClient(model=MODEL, model_info=INFO)
