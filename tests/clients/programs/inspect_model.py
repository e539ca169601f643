"""The models of Inspect that speak each API."""

from inspect_ai.model import GenerateConfig, get_model


def model_of(dialect, streams):
    if dialect == "messages":
        return get_model("anthropic/scripted", streaming=streams, config=GenerateConfig(max_tokens=512))
    config = GenerateConfig(
        reasoning_summary="none"
    )  # else it asks the model to say hello first, to see whether it may ask for one
    return get_model("openai/scripted", responses_api=dialect == "responses", streaming=streams, config=config)
