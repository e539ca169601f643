"""What a dialect offers: one wire format, both ways. It does no I/O; sampling, recording and sending are done elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.errors import RequestError
from penstock.gateway.call import ConversationHistory, ModelCall, Prompt
from penstock.gateway.reply import Delta
from penstock.records import Sampling, Step, Usage


@dataclass(slots=True)
class ModelAnswer:
    """What is known of an answer while it is written."""

    id: str
    """As `Step.answer` keeps it; a dialect puts its own prefix before it."""
    created: float
    """Seconds since 1970."""
    model: str
    call: ModelCall
    prompt: Prompt
    steps: list[Step] = field(default_factory=list[Step])
    """All choices, once they are durable."""

    def usage(self, steps: Sequence[Step]) -> Usage:
        """Tokens read and sampled: ours to count, or what an endpoint told of each choice, whose prompts it read one by one."""
        told = [step.usage.prompt_tokens for step in steps if step.usage is not None]
        prompt = sum(told) if told else len(self.prompt.ids)
        return Usage(prompt_tokens=prompt, completion_tokens=sum(step.sampled for step in steps))


class DialectTokenizer(Protocol):
    """What a dialect asks of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""
        ...

    def shield(self, value: Any) -> Any:
        """A text for `encode` in which nothing is taken for a special token."""
        ...


class UnsentTokens(NamedTuple):
    """Tokens of a choice that no event has told of yet."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Of the model's plain distribution."""


class EventWriter(Protocol):
    """Writes the events of one streamed answer; it may remember what it has told."""

    def start(self) -> bytes:
        """The first events of the stream."""
        ...

    def delta(self, choice: int, deltas: list[Delta], unsent: UnsentTokens) -> bytes:
        """Events for what a choice has grown by; empty where there is nothing to tell."""
        ...

    def finish_choice(self, choice: int, step: Step, unsent: UnsentTokens) -> bytes:
        """Events that end a choice, which is durable now."""
        ...

    def finish(self, steps: list[Step]) -> bytes:
        """Events that end the stream, after all choices."""
        ...


class Dialect(Protocol):
    path: str
    """Its route, from `/v1` on."""
    count_path: str | None
    """The route that only counts a request's tokens; None where the dialect has none."""
    ping: bytes
    """An event that says nothing, sent while the engine is silent so that nobody on the way gives the connection up."""

    def parse(self, body: dict[str, Any], defaults: Sampling, history: ConversationHistory) -> ModelCall:
        """The call that a request body makes. A field is honoured, refused by name, or listed as ignored."""
        ...

    def json_body(self, answer: ModelAnswer) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def events(self, answer: ModelAnswer) -> EventWriter:
        """A writer for an answer that is."""
        ...

    def count(self, tokens: int) -> dict[str, Any]:
        """What `count_path` answers for a prompt of this many tokens."""
        ...

    def error(self, error: RequestError) -> dict[str, Any]:
        """The body of a refusal."""
        ...

    def error_event(self, error: RequestError) -> bytes:
        """The last event of a stream that breaks off."""
        ...
