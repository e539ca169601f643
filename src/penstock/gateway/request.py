"""The records of one model call: its caller, the parsed request, the prompt, limits, and a summary for metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from starlette.types import Scope

from penstock.chat.templates import Tool, chain_digest, message_digest, tools_digest
from penstock.config import GatewaySection
from penstock.engines.base import TokenPath
from penstock.errors import RequestError
from penstock.gateway.graph import json_weight
from penstock.records import Message, PlacedPicture, ReplyFormat, Sampling, Step

CALL_SCOPE = "penstock.call"
"""The key of a `CallScope` in an ASGI scope."""


class CallScope(NamedTuple):
    """Who makes a request, as far as its token and path say."""

    rollout_id: str
    """The token's rollout; empty if it may be any, or no token is needed."""
    transcript: str = ""
    """As the path names it."""
    prompt_uid: str | None = None
    """The prompt's uid if the path, the body or a session names the rollout instead of a token."""
    named_by_path: bool = False
    """Whether the path names a trajectory and its prompt, as the base URL of a black-box agent does."""

    @classmethod
    def of(cls, scope: Scope) -> "CallScope":
        return scope[CALL_SCOPE]


class Caller(NamedTuple):
    """Who makes a call, by token, path and headers."""

    rollout_id: str
    transcript: str = "main"
    is_retry: bool = False
    """Whether the client may have sent this call before: it sent a retry count or an idempotency key."""
    key: str = ""
    """The client's idempotency key."""


class ConversationHistory(Protocol):
    """The rollout's earlier calls, for dialects that refer to them."""

    @property
    def last_request(self) -> "LastRequest":
        """The last request of the same transcript: what it repeats need not be parsed again."""
        ...

    def messages(self, answer: str) -> tuple[Message, ...] | None:
        """All messages of the path that ends with the first choice of an answer (`Step.answer`); None if it is unknown."""
        ...

    def tools(self, answer: str) -> tuple[Tool, ...] | None:
        """The tools of that path; None if it is unknown."""
        ...


class PictureTokens(NamedTuple):
    """What stands for a picture in prompts."""

    token: int
    """Written by the chat template."""
    ids: tuple[int, ...]
    """Put into its place by the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request to the model, independent of its dialect."""

    model: str
    """As the agent asked for it."""
    dialect: str = "chat"
    """Whose fields `extra` holds: `chat` or `messages`."""
    messages: tuple[Message, ...]
    sampling: Sampling
    policy: str = ""
    """The policy that answers it, of those in `[policies.*]`; empty if there are none."""
    tools: tuple[Tool, ...] = ()
    raw: str | tuple[int, ...] | None = None
    """A prompt without a chat template, as text or token ids; `messages` is then empty."""
    reads_calls: bool = False
    """Whether tool calls in the reply are parsed."""
    keeps_call_text: bool = False
    """Whether the content of the answer also has the text of its tool calls, for agents that parse it themselves."""
    forced: str | None = None
    """The tool that the reply must call, empty for any; None if the model may choose."""
    allowed: frozenset[str] = frozenset()
    """The tools that may be called, of those in the prompt; empty for all."""
    deferred: tuple[Tool, ...] = ()
    """Tools that may be called and are shown where a message refers to them, not at the head of the prompt."""
    one_call: bool = False
    """Whether the reply may make one tool call at most; it is cut before a second one."""
    prefill: str = ""
    """The beginning of the reply, given by the caller. The model continues it."""
    template_options: str = ""
    """Variables for the chat template, as a JSON object; empty if there are none."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the request that an endpoint gets as they are."""
    strict: frozenset[str] = frozenset()
    """The tools whose calls must follow their schemas."""
    format: ReplyFormat | None = None
    """The JSON that the reply must be; None if it may be any text."""
    format_field: str = "response_format"
    """Where the request holds `format`, for errors."""
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    echo: tuple[tuple[str, object], ...] = ()
    """Fields of the request that the dialect's answer repeats."""
    pictures: Mapping[str, PictureTokens] = field(default_factory=dict[str, PictureTokens])
    """By their digests, those in `messages` that the model sees."""
    ignored: tuple[str, ...] = ()
    """What was asked for and is not done, such as fields that the dialect does not know. They are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens that a reply is sampled after, and their position in the token graph."""

    ids: TokenPath
    parent: int | None
    added: tuple[int, ...]
    """The end of `ids`: the tokens that its node adds."""
    messages: tuple[Message, ...]
    """The messages that `added` renders."""
    tools: tuple[Tool, ...]
    chain: str
    reason: str | None = None
    omitted: tuple[str, ...] = ()
    """What `messages` held that the model cannot read: `image`, `document`, …; it got placeholders."""
    forced_prefix: str = ""
    """Text of the forced tool call that `ids` end with; the reply is parsed as if it began with it."""
    pictures: tuple[PlacedPicture, ...] = ()
    """All that lie in `ids`."""

    @property
    def added_pictures(self) -> tuple[PlacedPicture, ...]:
        """Those in `added`."""
        start = len(self.ids) - len(self.added)
        return tuple(picture.moved(-start) for picture in self.pictures if picture.first >= start)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Limits of one rollout and of one call; see `GatewaySection`. What exceeds one is refused, never truncated."""

    concurrent_calls: int = 256
    calls_per_s: float = 1000.0
    """Sustained; a burst of one second's worth is served at once."""
    steps: int = 100_000
    tokens: int = 100_000_000
    body_bytes: int = 16 << 20
    first_token_s: float = 600.0
    stall_s: float = 120.0
    reader_s: float = 60.0
    keep_alive_s: float = 5.0
    drain_s: float = 5.0

    @classmethod
    def of(cls, section: GatewaySection) -> "GatewayLimits":
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
class CallSummary:
    """What metrics and traces report of a call. Filled in while the call runs; what it did not reach stays empty."""

    caller: Caller | None = None
    call: ModelCall | None = None
    prompt_tokens: int = 0
    """As the engine got them; 0 if nothing was sampled, as for a replayed answer."""
    sampled_tokens: int = 0
    """The sum over all choices, recorded or not."""
    first_token_s: float | None = None
    """From the request to the engine until its first token."""
    steps: list[Step] = field(default_factory=list[Step])
    """Recorded steps, also of replies that broke off."""
    error: RequestError | None = None
    """The error that the caller got."""


# The last request

NO_TOOLS = tools_digest(())


class LastRequest:
    """The last request of one transcript, raw and parsed. What a first one has in common with `like` is not read again."""

    def __init__(self, like: "LastRequest | None" = None) -> None:
        self._raw: list[Any] = like._raw[:] if like else []
        self._messages: list[Message] = like._messages[:] if like else []
        self._raw_tools: Any = like._raw_tools if like else None
        self._tools: tuple[Tool, ...] = like._tools if like else ()
        self._chains: list[str] = like._chains[:] if like else [NO_TOOLS]
        """Digest of the tools, then of the path after each of `_messages`."""
        self._weights: list[int] = like._weights[:] if like else []
        """The weights of the first entries of `_raw`, each with its message; the others are weighed when `weight` is asked for."""
        self._tools_weight = like._tools_weight if like else 0

    @property
    def weight(self) -> int:
        """Bytes of memory that it takes, without what it shares with the token graph."""
        unweighed = zip(self._raw[len(self._weights) :], self._messages[len(self._weights) :], strict=False)
        self._weights += [json_weight(raw) + json_weight(message) for raw, message in unweighed]
        return self._tools_weight + sum(self._weights)

    def messages(self, raw: list[Any], read: Callable[[int, Any], Message]) -> tuple[Message, ...]:
        """Every entry of `raw` parsed by `read`; entries that repeat the last request are not parsed again."""
        known = _common_prefix(self._raw, raw)
        fresh = [read(index, raw[index]) for index in range(known, len(raw))]
        self._raw[known:], self._messages[known:] = raw[known:], fresh
        del self._weights[known:]
        del self._chains[known + 1 :]
        return tuple(self._messages)

    def tools(self, raw: Any, read: Callable[[Any], tuple[Tool, ...]]) -> tuple[Tool, ...]:
        """The tools parsed by `read`, unless they repeat the last request."""
        if raw != self._raw_tools:
            self._tools, self._raw_tools = read(raw), raw
            self._tools_weight = 2 * json_weight(raw)
            self._chains = [tools_digest(self._tools)]
        return self._tools

    def chains(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> list[str]:
        """Digest of the tools, then of the path after each message."""
        if tools is not self._tools:
            self._tools, self._raw_tools, self._chains = tools, None, [tools_digest(tools)]
        known = _common_prefix(self._messages, list(messages))
        if known < len(messages):
            self._messages, self._raw, self._weights = list(messages), [], []
        del self._chains[known + 1 :]
        for message in messages[len(self._chains) - 1 :]:
            self._chains.append(chain_digest(self._chains[-1], message_digest(message)))
        return list(self._chains)


def _common_prefix(before: list[Any], now: list[Any]) -> int:
    """Length of the common prefix of the two lists."""
    if now[: len(before)] == before:
        return len(before)
    pairs = enumerate(zip(before, now, strict=False))
    return next((index for index, (one, other) in pairs if one is not other and one != other), len(now))
