"""What the gateway's parts hand to each other about one model call: who makes it, what it asks, what its prompt is."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penstock.chat.templates import Tool
from penstock.config import GatewaySection
from penstock.errors import RequestError
from penstock.gateway.graph import TokenPath
from penstock.gateway.last_request import LastRequest
from penstock.records import Message, Sampling, Step


class Caller(NamedTuple):
    """Where a call comes from, by its token, path and headers."""

    rollout_id: str
    transcript: str = "main"
    is_retry: bool = False
    """Whether the client says that it may have sent this call before: a retry mark, or an idempotency key."""
    key: str = ""
    """The client's idempotency key."""


class Past(Protocol):
    """What a dialect may know of the rollout's earlier calls."""

    @property
    def talk(self) -> LastRequest:
        """The last call of the same transcript: what is sent again need not be read again."""
        ...

    def messages(self, answer: str) -> tuple[Message, ...] | None:
        """All messages of the path that ends with the first choice of this answer (`Step.answer`); None where there is none."""
        ...

    def tools(self, answer: str) -> tuple[Tool, ...] | None:
        """The tools of that path; None where there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to the model, whatever the dialect it came in."""

    model: str
    messages: tuple[Message, ...]
    sampling: Sampling
    tools: tuple[Tool, ...] = ()
    raw: str | tuple[int, ...] | None = None
    """A prompt that no chat template touches, as text or token ids; `messages` is empty then."""
    reads_calls: bool = False
    """Whether tool calls in the reply are parsed."""
    forced: str | None = None
    """The tool that the reply must call, empty for any of them; None where the model is free."""
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    echo: tuple[tuple[str, object], ...] = ()
    """Fields of the request that the dialect's answer repeats."""
    ignored: tuple[str, ...] = ()
    """What was asked for and is not done, such as fields that the dialect does not know; they are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens that a call's reply is sampled after, and how they hang on the graph."""

    ids: TokenPath
    parent: int | None
    added: tuple[int, ...]
    """The end of `ids` that its own node adds."""
    messages: tuple[Message, ...]
    """Those that `added` stands for."""
    tools: tuple[Tool, ...]
    chain: str
    reason: str | None = None
    begun: str = ""
    """The beginning of a forced call, which `ids` end with: the reply is read as if it had been sampled too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rollout may ask for and how long anything may take; see `GatewaySection`. More is refused, never cut quietly."""

    concurrent_calls: int = 256
    calls_per_s: float = 1000.0
    """A burst of as many is served at once."""
    steps: int = 100_000
    tokens: int = 100_000_000
    body_bytes: int = 64 << 20
    first_token_s: float = 600.0
    stall_s: float = 120.0
    reader_s: float = 60.0
    keep_alive_s: float = 5.0
    drain_s: float = 5.0

    @classmethod
    def of(cls, section: GatewaySection) -> "Limits":
        """The limits that a run's config sets."""
        return cls(
            concurrent_calls=section.rollout_calls,
            calls_per_s=section.rollout_calls_per_s,
            steps=section.rollout_steps,
            tokens=section.rollout_tokens,
            body_bytes=section.body_mb << 20,
            first_token_s=section.first_token_s,
            stall_s=section.stall_s,
            reader_s=section.reader_s,
            keep_alive_s=section.keep_alive_s,
            drain_s=section.drain_s,
        )


@dataclass(slots=True)
class Account:
    """Filled in on the way; what a call did not come to stays empty."""

    caller: Caller | None = None
    call: Call | None = None
    prompt_tokens: int = 0
    """As the engine got them; 0 where nothing was sampled, as for an answer that is given again."""
    sampled_tokens: int = 0
    """Of all choices, recorded or not."""
    first_token_s: float | None = None
    """From the request to the engine until its first token."""
    steps: list[Step] = field(default_factory=list[Step])
    """What was recorded, also of a reply that broke off."""
    error: RequestError | None = None
    """What the caller was told."""
