"""How the events of a relayed reply become parts: what makes no sense is a fault, never a guess."""

from abc import ABC, abstractmethod
from typing import Any

import orjson

from penstock.engines.relay.base import Argued, Called, Heard, Part, Said, Thought
from penstock.engines.wire import Fault
from penstock.records import Finish, Usage

STOPS: dict[str, Finish] = {
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


class PartsReader(ABC):
    """Reads the events of one reply; see `wire.Reader`."""

    def __init__(self) -> None:
        self.done = False
        self._parts: list[Part] = []
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
                raise Fault(f"reported an error: {words}", kind="broken")
            self.read(event)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as cause:
            raise _garbled(orjson.dumps(event, default=str)) from cause

    @abstractmethod
    def read(self, event: dict[str, Any]) -> None:
        """Call `say` and the others with what an event holds; any lookup or type error says that it makes no sense."""

    def drain(self) -> Heard | None:
        """All parts since the last call."""
        if not self._parts and not self.done:
            return None
        parts, self._parts = tuple(self._parts), []
        if not self.done:
            return Heard(parts)
        return Heard(parts, self._finish, Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._completion_tokens))

    def say(self, text: str | None) -> None:
        """More text."""
        if text:
            self._parts.append(Said(_text(text)))

    def think(self, text: str | None) -> None:
        """More reasoning."""
        if text:
            self._parts.append(Thought(_text(text)))

    def call(self, call_id: str | None, name: str) -> None:
        """A call begins."""
        if not name:
            raise Fault("called a tool without naming it", kind="garbled")
        self._parts.append(Called(_text(call_id or ""), _text(name)))

    def argue(self, text: str | None) -> None:
        """More of its arguments."""
        if text:
            self._parts.append(Argued(_text(text)))

    def count(self, *, prompt: int | None = None, completion: int | None = None) -> None:
        """What the endpoint says of tokens, the whole reply's so far."""
        self._prompt_tokens = max(self._prompt_tokens, int(prompt or 0))
        self._completion_tokens = max(self._completion_tokens, int(completion or 0))

    def stop(self, reason: str) -> None:
        """The reply has finished; counts may follow."""
        if reason not in STOPS:
            raise Fault(f"broke the reply off ({reason})", kind="broken")
        self._finish = STOPS[reason]

    def end(self) -> None:
        """Nothing follows."""
        if self._finish is None:
            raise Fault("ended without saying how the reply finished", kind="broken")
        self.done = True

    @property
    def has_finished(self) -> bool:
        """Whether `stop` was called."""
        return self._finish is not None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not text: {value!r}")
    return value


def _garbled(event: bytes) -> Fault:
    return Fault(f"sent an event that no reply has: {event[:100].decode('utf-8', 'replace')}", kind="garbled")
