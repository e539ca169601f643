"""The interface of a dialect: one wire format, requests and responses. A dialect does no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.errors import RequestError
from penstock.gateway.reply import Delta
from penstock.gateway.request import ConversationHistory, ModelCall, Prompt
from penstock.records import Message, Sampling, Step, TokenLogprobs, Usage


@dataclass(slots=True)
class ModelAnswer:
    """A response while a dialect formats it."""

    id: str
    """The answer's name (`Step.answer`); a dialect adds its own prefix."""
    created: float
    """Seconds since 1970."""
    model: str
    call: ModelCall
    prompt: Prompt
    steps: list[Step] = field(default_factory=list[Step])
    """All choices, once they are durable."""

    def visible(self, message: Message) -> Message:
        """A reply without the beginning that the caller gave."""
        begun = self.call.prefill
        return message if not begun else {**message, "content": (message["content"] or "").removeprefix(begun)}

    def usage(self, steps: Sequence[Step]) -> Usage:
        """Token counts: our own, or an endpoint's reports, which count the prompt once for each choice."""
        reported = [step.usage.prompt_tokens for step in steps if step.usage is not None]
        prompt = sum(reported) if reported else len(self.prompt.ids)
        return Usage(prompt_tokens=prompt, completion_tokens=sum(step.sampled for step in steps))


class DialectTokenizer(Protocol):
    """What a dialect needs of a tokenizer."""

    @property
    def is_known(self) -> bool:
        """False for an endpoint, whose tokens are not known and which may do what an engine of ours cannot."""
        ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> Sequence[int]: ...

    def shield(self, value: Any) -> Any:
        """A text for `encode` in which nothing is taken for a special token."""
        ...


class UnsentTokens(NamedTuple):
    """Tokens of a choice that no event has sent yet."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Of the model's plain distribution."""
    most_likely: Sequence[TokenLogprobs] = ()
    """See `Step.most_likely`."""

    def then(self, ids: Sequence[int], logprobs: Sequence[float], most_likely: Sequence[TokenLogprobs]) -> "UnsentTokens":
        return UnsentTokens([*self.ids, *ids], [*self.logprobs, *logprobs], [*self.most_likely, *most_likely])


class EventWriter(Protocol):
    """Formats the events of one streamed response; keeps state between calls."""

    def start(self) -> bytes:
        """The first events of the stream."""
        ...

    def delta(self, choice: int, deltas: list[Delta], unsent: UnsentTokens) -> bytes:
        """Events for new deltas of a choice; empty if there is nothing to send."""
        ...

    def finish_choice(self, choice: int, step: Step, unsent: UnsentTokens) -> bytes:
        """Events that end a choice, which is now durable."""
        ...

    def finish(self, steps: list[Step]) -> bytes:
        """Events that end the stream, after all choices."""
        ...


class Dialect(Protocol):
    path: str
    """Of its route."""
    count_path: str | None
    """Of the route that counts a prompt's tokens; None if the dialect has none."""
    ping: bytes
    """An event without content, sent while the engine is silent, so that no proxy closes the connection."""

    def parse(self, body: dict[str, Any], defaults: Sampling, history: ConversationHistory) -> ModelCall:
        """Parse a request body. Every field is honoured, refused by name, or listed as ignored."""
        ...

    def json_body(self, answer: ModelAnswer) -> bytes:
        """The body of a response that is not streamed."""
        ...

    def events(self, answer: ModelAnswer) -> EventWriter:
        """The writer of a streamed response."""
        ...

    def count(self, tokens: int) -> dict[str, Any]:
        """The response body of `count_path`."""
        ...

    def error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error."""
        ...

    def error_event(self, error: RequestError) -> bytes:
        """The last event of a stream that fails."""
        ...
