"""Notices calls that a rollout makes to a model provider directly: they are not recorded, and nothing can be trained on them."""

import sys
from functools import cache
from typing import Any

from penstock.sdk import routing

PROVIDERS = (
    "anthropic.com",
    "cohere.com",
    "deepseek.com",
    "fireworks.ai",
    "generativelanguage.googleapis.com",
    "groq.com",
    "mistral.ai",
    "openai.azure.com",
    "openai.com",
    "openrouter.ai",
    "perplexity.ai",
    "together.xyz",
    "x.ai",
)
"""Whose hosts, or subdomains, serve models; Amazon's are told by `bedrock` in the name."""


@cache
def watch() -> None:
    """Note on the running rollout's context each provider whose address is looked up. Python offers no way to stop watching."""
    sys.addaudithook(_noticed)


def is_provider(host: str) -> bool:
    """Whether models are served there."""
    name = host.lower().rstrip(".")
    amazon = name.startswith("bedrock") and name.endswith(".amazonaws.com")
    return amazon or any(name == known or name.endswith(f".{known}") for known in PROVIDERS)


def _noticed(event: str, args: tuple[Any, ...]) -> None:
    if event != "socket.getaddrinfo":
        return
    host: str = args[0].decode("ascii", "replace") if isinstance(args[0], bytes) else str(args[0])
    context = routing.get_rollout_context()
    if context is not None and is_provider(host):
        context.strays.add(host)
