"""Text endpoints: messages and tools in; text, tool calls and token counts out, streamed."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import orjson

from penstock.engines.base import SampledChunk
from penstock.errors import EngineError
from penstock.http.client import UpstreamError
from penstock.records import Finish, Message, ReplyFormat, Sampling, Usage

FINISH_REASONS: dict[str, Finish] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "tool_use": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
"""Reasons by which endpoints end a reply. Any other reason, such as a content filter's, makes it an error."""


EFFORT = frozenset({"reasoning_effort", "reasoning.effort", "output_config.effort"})
"""The dialects' names of what every endpoint gets under its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One request for one reply."""

    messages: Sequence[Message]
    """In the OpenAI form, system messages included."""
    sampling: Sampling
    tools: Sequence[dict[str, Any]] = ()
    """In the OpenAI form."""
    may_call: bool = True
    """Whether the reply may call a tool."""
    forced: str | None = None
    """The tool that the reply must call; empty for any tool; None if none is forced."""
    allowed: frozenset[str] = frozenset()
    """The tools that may be called; empty for all."""
    one_call: bool = False
    """Whether the reply may make one tool call at most."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of the caller's request, in the form of `dialect`."""
    dialect: str = "chat"
    """`chat` or `messages`."""
    strict: frozenset[str] = frozenset()
    """The tools whose calls must follow their schemas."""
    format: ReplyFormat | None = None
    """The JSON that the reply must be; None if it may be any text."""


class TextPart(NamedTuple):
    text: str


class ReasoningPart(NamedTuple):
    text: str
    signature: str = ""
    """Ends a block of reasoning; the endpoint demands both back."""


class ToolCallPart(NamedTuple):
    """The beginning of a tool call; its arguments follow."""

    id: str
    """The endpoint's id; empty if it sends none."""
    name: str


class ArgumentsPart(NamedTuple):
    """More of the arguments of the last call, as JSON text."""

    text: str


ReplyPart = TextPart | ReasoningPart | ToolCallPart | ArgumentsPart


class TextChunk(NamedTuple):
    """What came since the last chunk of the same reply. The last chunk has the finish reason and the token counts."""

    parts: tuple[ReplyPart, ...]
    finish: Finish | None = None
    usage: Usage | None = None


class TextEndpoint(ABC):
    """An engine without tokens or weights: the methods of `Engine` that need them raise EngineError."""

    unknown_sampling: ClassVar[tuple[str, ...]] = ()
    """Fields of `Sampling` that the API has no name for; they are left out."""
    speaks: ClassVar[str] = "chat"
    """The dialect whose `TextRequest.extra` it gets as it is; see `TextRequest.dialect`."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def model(self) -> str:
        """The endpoint's name for the model."""
        return self._name

    @property
    def context_length(self) -> int:
        """Unknown: the endpoint itself refuses a conversation that is too long."""
        return 0

    @property
    def version(self) -> int:
        return 0

    def gets(self, name: str, dialect: str, extra: Mapping[str, Any]) -> bool:
        """Whether something of a request reaches the endpoint, by the name that it would be counted under."""
        if name in EFFORT or dialect != self.speaks:
            return name in EFFORT
        as_sent = "messages" in extra
        return as_sent or name.removeprefix("text.") in extra or (name.startswith("tool:") and "tools" in extra)

    @abstractmethod
    def complete(self, request: TextRequest, *, rollout_id: str = "") -> AsyncGenerator[TextChunk, None]:
        """Stream one reply. Closing the generator closes the connection.

        Raises EngineBusy if the endpoint has no room, EngineError if it fails, and RequestError if it would refuse the same
        request again; after the first chunk EngineError only.
        """

    async def count_tokens(self, request: TextRequest) -> int | None:
        """The tokens of a request's prompt; None if the API cannot count them. EngineError or RequestError as `complete`."""
        return None

    @abstractmethod
    async def close(self) -> None: ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        raise EngineError(f"{self._name} is behind an endpoint that takes messages, not tokens; call `complete`")

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        raise self._no_weights(version)

    async def load(self, version: int, folder: Path) -> None:
        raise self._no_weights(version)

    def _no_weights(self, version: int) -> EngineError:
        return EngineError(f"policy version {version}: {self._name} is behind an endpoint, whose weights are not ours to change")


class TextReplyReader(ABC):
    """Reads the events of one reply; see `http.client.EventReader`."""

    def __init__(self) -> None:
        self.done = False
        self._parts: list[ReplyPart] = []
        self._finish: Finish | None = None
        self._prompt_tokens = self._completion_tokens = 0

    def feed(self, event: bytes) -> None:
        """Add an event. Events after the end of the reply are ignored."""
        if self.done:
            return
        if event == b"[DONE]":
            self.end()
            return
        try:
            self.feed_json(orjson.loads(event))
        except orjson.JSONDecodeError as cause:
            raise _garbled(event) from cause

    def feed_json(self, event: Any) -> None:
        """Add an event that is already parsed."""
        try:
            if (error := event.get("error")) is not None:
                text = error if isinstance(error, str) else error.get("message")
                raise UpstreamError(f"reported an error: {text}", kind="broken")
            self.read(event)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as cause:
            raise _garbled(orjson.dumps(event, default=str)) from cause

    @abstractmethod
    def read(self, event: dict[str, Any]) -> None:
        """Call the methods below with what an event holds. A lookup or type error marks the event as garbled."""

    def take_chunk(self) -> TextChunk | None:
        """Return all parts since the last call."""
        if not self._parts and not self.done:
            return None
        parts, self._parts = tuple(self._parts), []
        if not self.done:
            return TextChunk(parts)
        return TextChunk(parts, self._finish, Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._completion_tokens))

    def add_text(self, text: str | None) -> None:
        if text:
            self._parts.append(TextPart(_check_text(text)))

    def add_reasoning(self, text: str | None) -> None:
        if text:
            self._parts.append(ReasoningPart(_check_text(text)))

    def add_signature(self, text: str | None) -> None:
        if text:
            self._parts.append(ReasoningPart("", _check_text(text)))

    def begin_call(self, call_id: str | None, name: str) -> None:
        if not name:
            raise UpstreamError("called a tool without naming it", kind="garbled")
        self._parts.append(ToolCallPart(_check_text(call_id or ""), _check_text(name)))

    def add_arguments(self, text: str | None) -> None:
        if text:
            self._parts.append(ArgumentsPart(_check_text(text)))

    def set_usage(self, *, prompt: int | None = None, completion: int | None = None) -> None:
        """Set the token counts of the reply so far. Endpoints repeat them in several events; the largest is right."""
        self._prompt_tokens = max(self._prompt_tokens, int(prompt or 0))
        self._completion_tokens = max(self._completion_tokens, int(completion or 0))

    def set_finish(self, reason: str) -> None:
        """Set how the reply finished. Token counts may still follow."""
        if reason not in FINISH_REASONS:
            raise UpstreamError(f"broke the reply off ({reason})", kind="broken")
        self._finish = FINISH_REASONS[reason]

    def end(self) -> None:
        """Mark the reply as complete."""
        if self._finish is None:
            raise UpstreamError("ended without saying how the reply finished", kind="broken")
        self.done = True


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not text: {value!r}")
    return value


def _garbled(event: bytes) -> UpstreamError:
    return UpstreamError(f"sent an event that no reply has: {event[:100].decode('utf-8', 'replace')}", kind="garbled")
