"""`[experiment] model_path` to what samples: weights of our own, or an endpoint of somebody else's."""

import re
from pathlib import Path
from typing import Any

from penstock.engines import ENGINES
from penstock.errors import ConfigError, Issue, several

ENDPOINTS = ("anthropic", "openai")
"""Providers with an engine of their own, which knows their address and whose key goes there."""
LITELLM = (
    *("azure", "bedrock", "cerebras", "cohere", "databricks", "deepinfra", "deepseek", "fireworks_ai", "gemini", "groq", "litellm"),
    *("mistral", "nvidia_nim", "ollama", "openrouter", "perplexity", "replicate", "sambanova", "together_ai", "vertex_ai", "xai"),
)
"""Providers that are reached through LiteLLM."""
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^@\s]+)?", re.ASCII)


def policy(model_path: str, code: Path, where: str) -> dict[str, Any]:
    """The `model` and `engine` tables for a model path; a path is looked for under `code` first.

    `openai/NAME`, `anthropic/NAME` and `PROVIDER/NAME` of LiteLLM's are endpoints; any other `ORG/NAME` is a repository on the hub.
    """
    if (code / model_path).exists():
        return {"model": {"name": str((code / model_path).resolve())}}
    engine = endpoint_engine(model_path)
    if engine is not None:
        _check_engine(engine, model_path, where)
        whole = engine == "litellm" and not model_path.startswith("litellm/")
        return {"model": {"name": model_path if whole else model_path.partition("/")[2]}, "engine": {"name": engine}}
    if HUB.fullmatch(model_path) and not Path(model_path).expanduser().exists():
        return {"model": {"name": f"hf:{model_path}"}}
    return {"model": {"name": model_path}}


def endpoint_engine(model_path: str) -> str | None:
    """The engine that asks others for text, where they hold the weights: it can be measured, not trained. None for weights."""
    provider, slash, _ = model_path.partition("/")
    if not slash:
        return None
    return provider if provider in ENDPOINTS else "litellm" if provider in LITELLM else None


def _check_engine(name: str, model_path: str, where: str) -> None:
    try:
        ENGINES.check(name)
    except ConfigError as cause:
        text = f"experiment.model_path = {model_path!r}: no engine {name!r} is installed; name weights, such as smollm2-135m"
        raise several(where, [Issue("experiment.model_path", text)]) from cause
