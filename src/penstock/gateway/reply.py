"""A reply as it is sampled: its token columns, and the text and calls that the agent may see so far."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from penstock.chat.parsers.base import Arguments, Piece, Reasoning, ReplyParser, Text, ToolCall
from penstock.chat.tokenizer import TextDecoder
from penstock.engines.base import SampledChunk
from penstock.records import Finish, Message, Usage


class CallDelta(NamedTuple):
    """A tool call begins, or its arguments grow."""

    ordinal: int
    id: str
    name: str
    arguments: str
    """What is new of them."""
    begins: bool = True


Delta = Text | Reasoning | CallDelta


class Pushed(NamedTuple):
    """What some tokens came to."""

    used: int
    """How many of them belong to the reply: all, unless one completed a stop string."""
    pieces: list[Piece]


class ReplyText:
    """Token ids to pieces for the agent: whole characters only, cut at a stop string, markup held back.

    `begun` is the beginning of the reply that stands in the prompt already.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str], parser: ReplyParser | None, begun: str = "") -> None:
        self._decoder = decoder
        self._stops = stops
        self._parser = parser
        self._held = ""
        self._begun = self._parse(begun)
        self.stopped = False
        """Whether a stop string was completed; nothing after it is shown."""

    def push(self, ids: Sequence[int]) -> Pushed:
        """What these tokens make certain."""
        pieces, self._begun = self._begun, []
        if not self._stops:
            return Pushed(len(ids), [*pieces, *self._parse(self._decoder.push(ids))])
        for place, token_id in enumerate(ids):
            pieces += self._parse(self._until_stop(self._decoder.push([token_id])))
            if self.stopped:
                return Pushed(place + 1, pieces)
        return Pushed(len(ids), pieces)

    def finish(self) -> list[Piece]:
        """What was held back to the end."""
        text = "" if self.stopped else self._until_stop(self._decoder.finish()) + self._held
        return [*self._begun, *self._parse(text), *(self._parser.finish() if self._parser else ())]

    def _until_stop(self, text: str) -> str:
        """`text` as far as it is certain to come before any stop string."""
        if self.stopped:
            return ""
        held = self._held + text
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _parse(self, text: str) -> list[Piece]:
        if not text:
            return []
        return self._parser.push(text) if self._parser else [Text(text)]


class ReplyBuilder(ABC):
    """One reply while it comes: what the agent is shown of it, and its tokens where they are known.

    `seed` tells its tool-call ids from those of other replies.
    """

    def __init__(self, *, seed: str) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.full_logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: Finish | None = None
        self.usage: Usage | None = None
        """What is said of its tokens where they are not known."""
        self.calls: list[CallDelta] = []
        """As far as they have come."""
        self._seed = seed
        self._said: list[str] = []
        self._thought: list[str] = []

    @abstractmethod
    def take(self, chunk: Any) -> list[Delta]:
        """Add what its source gave; what of it the agent may see."""

    @abstractmethod
    def end(self, finish: Finish) -> list[Delta]:
        """Nothing more comes; give out what was held back. A reply that has ended stays as it is."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come yet."""
        return not (self.ids or self.calls or self._said or self._thought)

    def message(self) -> Message:
        """The assistant message as the agent saw it."""
        message: Message = {"role": "assistant", "content": "".join(self._said)}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [tool_call(call) for call in self.calls]
        return message

    def speak(self, piece: Text | Reasoning) -> Delta:
        (self._said if isinstance(piece, Text) else self._thought).append(piece.text)
        return piece

    def call(self, name: str, arguments: str, call_id: str = "") -> CallDelta:
        self.calls.append(CallDelta(len(self.calls), call_id or self._call_id(name), name, arguments))
        return self.calls[-1]

    def argue(self, text: str) -> CallDelta:
        """More of the last call's arguments."""
        last = self.calls[-1]
        self.calls[-1] = last._replace(arguments=last.arguments + text)
        return last._replace(arguments=text, begins=False)

    def _call_id(self, name: str) -> str:
        """The same for the same place of the same reply, and another one for the next call."""
        key = f"{self._seed}\0{len(self.calls)}\0{name}"
        return f"call_{blake2b(key.encode(), digest_size=12).hexdigest()}"


class Reply(ReplyBuilder):
    """One reply while it is sampled."""

    def __init__(self, text: ReplyText, *, seed: str) -> None:
        super().__init__(seed=seed)
        self._text = text

    def take(self, chunk: SampledChunk) -> list[Delta]:
        """Add what the engine sampled; tokens after a completed stop string are left out, as if never sampled."""
        used, pieces = self._text.push(chunk.ids)
        self.ids += chunk.ids[:used]
        self.logprobs += chunk.logprobs[:used]
        self.full_logprobs += (chunk.full_logprobs or chunk.logprobs)[:used]
        self.versions += chunk.versions[:used]
        deltas = self._issue(pieces)
        finish = "stop" if self._text.stopped else chunk.finish
        return deltas if finish is None else [*deltas, *self.end(finish)]

    def end(self, finish: Finish) -> list[Delta]:
        if self.finish is not None:
            return []
        self.finish = finish
        return self._issue(self._text.finish())

    def _issue(self, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                deltas.append(self.call(*piece))
            elif isinstance(piece, Arguments):
                deltas.append(self.argue(piece.text))
            else:
                deltas.append(self.speak(piece))
        return deltas


def tool_call(call: CallDelta) -> dict[str, Any]:
    """A call in the OpenAI form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def deltas_of(message: Message) -> list[Delta]:
    """A recorded reply as if it came at once."""
    deltas: list[Delta] = [Reasoning(message["reasoning_content"])] if message.get("reasoning_content") else []
    if message["content"]:
        deltas.append(Text(message["content"]))
    for ordinal, call in enumerate(message.get("tool_calls") or ()):
        deltas.append(CallDelta(ordinal, call["id"], call["function"]["name"], call["function"]["arguments"]))
    return deltas


def sse(event: Any) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
