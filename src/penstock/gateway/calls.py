"""What the gateway's parts hand to each other about one model call: who makes it, what it asks, what its prompt is."""

from dataclasses import dataclass
from typing import NamedTuple

from penstock.records import Message, Sampling
from penstock.render.chat import Tool


class Caller(NamedTuple):
    """Where a call comes from, by its token and headers."""

    rollout_id: str
    transcript: str = "main"
    is_retry: bool = False
    """Whether the client says that it sends the same call again because it got no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to the model, whatever the dialect it came in."""

    model: str
    messages: tuple[Message, ...]
    sampling: Sampling
    tools: tuple[Tool, ...] = ()
    reads_calls: bool = False
    """Whether tool calls in the reply are parsed."""
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    ignored: tuple[str, ...] = ()
    """Fields that the dialect does not know; they change nothing and are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens that a call's reply is sampled after, and how they hang on the graph."""

    ids: tuple[int, ...]
    parent: int | None
    added: tuple[int, ...]
    """The end of `ids` that its own node adds."""
    messages: tuple[Message, ...]
    """Those that `added` stands for."""
    tools: tuple[Tool, ...]
    chain: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rollout may ask for; more is refused, never cut silently."""

    concurrent_calls: int = 256
    steps: int = 100_000
    body_bytes: int = 64 << 20
