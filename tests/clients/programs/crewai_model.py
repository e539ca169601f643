"""The models of crewAI that speak each API, with its traces kept at home."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM


def model_of(dialect, streams):
    if dialect == "messages":
        return LLM(
            model="scripted", provider="anthropic", base_url=os.environ["ANTHROPIC_BASE_URL"], max_tokens=512, stream=streams
        )
    api = "responses" if dialect == "responses" else "completions"
    return LLM(model="scripted", provider="openai", base_url=os.environ["OPENAI_BASE_URL"], api=api, stream=streams)
