"""What a dialect offers: one wire format, both ways. It is pure; sampling, recording and sending are done elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.errors import RequestError
from penstock.gateway.calls import Call, Prompt
from penstock.gateway.stream import Delta
from penstock.records import Sampling, Step


@dataclass(slots=True)
class Answer:
    """What is known of an answer while it is written."""

    id: str
    created: int
    """Seconds since 1970, for show."""
    model: str
    call: Call
    prompt: Prompt
    steps: list[Step] = field(default_factory=list[Step])
    """All choices, once they are durable."""


class Fresh(NamedTuple):
    """Tokens of a choice that no event has told of yet."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Of the model's plain distribution."""


class Dialect(Protocol):
    """One wire format."""

    path: str
    """Its route."""

    def parse(self, body: dict[str, Any], defaults: Sampling) -> Call:
        """The call that a request body makes. A field is honoured, refused by name, or listed as ignored."""
        ...

    def whole(self, answer: Answer) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def opening(self, answer: Answer) -> bytes:
        """The first events of a stream."""
        ...

    def grown(self, answer: Answer, choice: int, deltas: list[Delta], fresh: Fresh) -> bytes:
        """Events for what a choice has grown by; empty where there is nothing to tell."""
        ...

    def closing(self, answer: Answer, choice: int, step: Step, fresh: Fresh) -> bytes:
        """Events that end a choice."""
        ...

    def ending(self, answer: Answer) -> bytes:
        """Events that end the stream, after all choices."""
        ...

    def error(self, error: RequestError) -> dict[str, Any]:
        """An error in this dialect's form: the body of a refusal, or the last event of a broken stream."""
        ...
