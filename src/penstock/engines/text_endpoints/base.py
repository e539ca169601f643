"""What every relay offers: messages and tools in; text, calls and the counts of tokens out, as they come."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.engines.base import SampledChunk
from penstock.errors import EngineError
from penstock.http.client import UpstreamError
from penstock.records import Finish, Message, Sampling, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One request for one reply."""

    messages: Sequence[Message]
    """In the OpenAI form, system messages among them."""
    sampling: Sampling
    tools: Sequence[dict[str, Any]] = ()
    """In the OpenAI form."""
    may_call: bool = True
    """Whether the reply may call one of the tools."""
    forced: str | None = None
    """The tool that it must call, empty for any of them; None where the model is free."""


class TextPart(NamedTuple):
    text: str


class ReasoningPart(NamedTuple):
    """More reasoning, where the endpoint shows it."""

    text: str


class ToolCallPart(NamedTuple):
    id: str
    """The endpoint's own; empty where it gives none."""
    name: str


class ArgumentsPart(NamedTuple):
    """More of the arguments of the call that began last, JSON text."""

    text: str


ReplyPart = TextPart | ReasoningPart | ToolCallPart | ArgumentsPart


class TextChunk(NamedTuple):
    """What came since the last chunk of the same reply; the last one says how it finished, and what it cost."""

    parts: tuple[ReplyPart, ...]
    finish: Finish | None = None
    usage: Usage | None = None


class TextEndpoint(ABC):
    """An engine that knows no tokens: what asks for tokens, or brings weights, is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def model(self) -> str:
        """The endpoint's name for the model."""
        return self._name

    @property
    def context_length(self) -> int:
        """Not known here: the endpoint says when a conversation is too long."""
        return 0

    @property
    def version(self) -> int:
        return 0

    @abstractmethod
    def ask(self, asked: TextRequest, *, rollout_id: str = "") -> AsyncGenerator[TextChunk, None]:
        """Ask for one reply. Closing the generator hangs up.

        Raises EngineBusy where the endpoint has no room, EngineError where it fails, and RequestError where it would refuse the
        same request again; after the first chunk EngineError only.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of all connections."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        raise EngineError(f"{self._name} is behind an endpoint that takes messages, not tokens; `ask` it")

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        raise EngineError(f"policy version {version}: {self._name} is behind an endpoint, whose weights are not ours to change")

    async def load(self, version: int, folder: Path) -> None:
        raise EngineError(f"policy version {version}: {self._name} is behind an endpoint, whose weights are not ours to change")


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
"""How endpoints say that a reply has come to its end. Any other reason, such as a filter's, breaks it off."""


class TextReplyReader(ABC):
    """Reads the events of one reply; see `wire.Reader`."""

    def __init__(self) -> None:
        self.done = False
        self._parts: list[ReplyPart] = []
        self._finish: Finish | None = None
        self._prompt_tokens = self._completion_tokens = 0

    def take(self, event: bytes) -> None:
        """Add an event; what follows the end of the reply is left out."""
        if self.done:
            return
        if event == b"[DONE]":
            self.end()
            return
        try:
            self.add(orjson.loads(event))
        except orjson.JSONDecodeError as cause:
            raise _garbled(event) from cause

    def add(self, event: Any) -> None:
        """The same of an event that has been parsed."""
        try:
            if (error := event.get("error")) is not None:
                words = error if isinstance(error, str) else error.get("message")
                raise UpstreamError(f"reported an error: {words}", kind="broken")
            self.read(event)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as cause:
            raise _garbled(orjson.dumps(event, default=str)) from cause

    @abstractmethod
    def read(self, event: dict[str, Any]) -> None:
        """Call `say` and the others with what an event holds; any lookup or type error says that it makes no sense."""

    def drain(self) -> TextChunk | None:
        """All parts since the last call."""
        if not self._parts and not self.done:
            return None
        parts, self._parts = tuple(self._parts), []
        if not self.done:
            return TextChunk(parts)
        return TextChunk(parts, self._finish, Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._completion_tokens))

    def say(self, text: str | None) -> None:
        if text:
            self._parts.append(TextPart(_text(text)))

    def think(self, text: str | None) -> None:
        if text:
            self._parts.append(ReasoningPart(_text(text)))

    def call(self, call_id: str | None, name: str) -> None:
        if not name:
            raise UpstreamError("called a tool without naming it", kind="garbled")
        self._parts.append(ToolCallPart(_text(call_id or ""), _text(name)))

    def argue(self, text: str | None) -> None:
        """More of its arguments."""
        if text:
            self._parts.append(ArgumentsPart(_text(text)))

    def count(self, *, prompt: int | None = None, completion: int | None = None) -> None:
        """What the endpoint says of tokens, the whole reply's so far."""
        self._prompt_tokens = max(self._prompt_tokens, int(prompt or 0))
        self._completion_tokens = max(self._completion_tokens, int(completion or 0))

    def stop(self, reason: str) -> None:
        """The reply has finished; counts may follow."""
        if reason not in FINISH_REASONS:
            raise UpstreamError(f"broke the reply off ({reason})", kind="broken")
        self._finish = FINISH_REASONS[reason]

    def end(self) -> None:
        if self._finish is None:
            raise UpstreamError("ended without saying how the reply finished", kind="broken")
        self.done = True

    @property
    def has_finished(self) -> bool:
        """Whether `stop` was called."""
        return self._finish is not None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not text: {value!r}")
    return value


def _garbled(event: bytes) -> UpstreamError:
    return UpstreamError(f"sent an event that no reply has: {event[:100].decode('utf-8', 'replace')}", kind="garbled")
