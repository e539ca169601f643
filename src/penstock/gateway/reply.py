"""Replies while they are sampled: token columns, and the text and tool calls that the agent may see so far."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from penstock.chat.parsers.base import Arguments, Piece, Reasoning, ReplyParser, Text, ToolCall
from penstock.chat.tokenizer import TextDecoder
from penstock.engines.base import SampledChunk
from penstock.records import Finish, Message, TokenLogprobs, Usage


class CallDelta(NamedTuple):
    """The start of a tool call, or more of its arguments."""

    ordinal: int
    id: str
    name: str
    arguments: str
    """The new part."""
    begins: bool = True


Delta = Text | Reasoning | CallDelta


class DecodedTokens(NamedTuple):
    """The result of decoding some tokens."""

    used: int
    """How many of them belong to the reply: all, unless a stop string was completed."""
    pieces: list[Piece]


class ReplyText:
    """Decodes token ids to pieces for the agent: whole characters, cut at a stop string, markup held back until it is parsed.

    `prefix` is the beginning of the reply that the prompt already holds (a forced tool call).
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str], parser: ReplyParser | None, prefix: str = "") -> None:
        self._decoder = decoder
        self._stops = stops
        self._parser = parser
        self._held = ""
        self._prefix = self._parse(prefix)
        self.stopped = False
        """Whether a stop string was completed."""

    def push(self, ids: Sequence[int]) -> DecodedTokens:
        """The pieces that these tokens complete."""
        pieces, self._prefix = self._prefix, []
        if not self._stops:
            return DecodedTokens(len(ids), [*pieces, *self._parse(self._decoder.push(ids))])
        for used, token_id in enumerate(ids):
            pieces += self._parse(self._until_stop(self._decoder.push([token_id])))
            if self.stopped:
                return DecodedTokens(used + 1, pieces)
        return DecodedTokens(len(ids), pieces)

    def finish(self) -> list[Piece]:
        """The pieces that were held back."""
        text = "" if self.stopped else self._until_stop(self._decoder.finish()) + self._held
        return [*self._prefix, *self._parse(text), *(self._parser.finish() if self._parser else ())]

    def _until_stop(self, text: str) -> str:
        """The part of the text that certainly comes before any stop string; the rest is held back."""
        if self.stopped:
            return ""
        held = self._held + text
        found = [start for stop in self._stops if (start := held.find(stop)) >= 0]
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
    """One reply while it is received: what the agent sees of it, and its tokens if they are known.

    `seed` makes its tool-call ids differ from those of other replies; `prefill` is the beginning that the caller gave.
    """

    def __init__(self, *, seed: str, prefill: str = "") -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.full_logprobs: list[float] = []
        self.behaviour_known = True
        """See `Step.behaviour_known`."""
        self.versions: list[int] = []
        self.kept: list[bytes] = []
        """See `Step.kept`."""
        self.most_likely: list[TokenLogprobs] = []
        """See `Step.most_likely`."""
        self.finish: Finish | None = None
        self.usage: Usage | None = None
        """The token counts that an endpoint reports, if the tokens are not known."""
        self.calls: list[CallDelta] = []
        """Tool calls so far; the last may be incomplete."""
        self.is_cut = False
        """Whether it was ended before a second tool call."""
        self._seed = seed
        self._prefill = prefill
        self._text_parts: list[str] = [prefill] if prefill else []
        self._reasoning_parts: list[str] = []

    @abstractmethod
    def add(self, chunk: Any) -> list[Delta]:
        """Add a chunk of the source; returns what the agent may see of it."""

    @abstractmethod
    def end(self, finish: Finish) -> list[Delta]:
        """End the reply and return what was held back; does nothing if it has ended."""

    @property
    def is_empty(self) -> bool:
        return not (self.ids or self.calls or self._text_parts[bool(self._prefill) :] or self._reasoning_parts)

    def message(self) -> Message:
        """The assistant message as the agent saw it."""
        message: Message = {"role": "assistant", "content": "".join(self._text_parts)}
        if self._reasoning_parts:
            message["reasoning_content"] = "".join(self._reasoning_parts)
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [tool_call(call) for call in self.calls]
        return message

    def add_text(self, piece: Text | Reasoning) -> Delta:
        (self._text_parts if isinstance(piece, Text) else self._reasoning_parts).append(piece.text)
        return piece

    def add_call(self, name: str, arguments: str, call_id: str = "") -> CallDelta:
        self.calls.append(CallDelta(len(self.calls), call_id or self._call_id(name), name, arguments))
        return self.calls[-1]

    def add_arguments(self, text: str) -> CallDelta:
        """Append to the arguments of the last call."""
        last = self.calls[-1]
        self.calls[-1] = last._replace(arguments=last.arguments + text)
        return last._replace(arguments=text, begins=False)

    def _call_id(self, name: str) -> str:
        """Deterministic: the same call of the same reply gets the same id."""
        key = f"{self._seed}\0{len(self.calls)}\0{name}"
        return f"call_{blake2b(key.encode(), digest_size=12).hexdigest()}"


class SampledReply(ReplyBuilder):
    """A reply of an engine, with its tokens. With `one_call` it ends before a second tool call.

    `make_text` returns the reader of a reply from its first token on.
    """

    def __init__(self, make_text: Callable[[], ReplyText], *, seed: str, prefill: str = "", one_call: bool = False) -> None:
        super().__init__(seed=seed, prefill=prefill)
        self._make_text = make_text
        self._text = make_text()
        self._one_call = one_call

    def add(self, chunk: SampledChunk) -> list[Delta]:
        """Add sampled tokens; those after a completed stop string are dropped, as if never sampled."""
        if self._one_call:
            return self._add_until_second_call(chunk)
        used, pieces = self._text.push(chunk.ids)
        self.ids += chunk.ids[:used]
        self.logprobs += chunk.logprobs[:used]
        self.full_logprobs += (chunk.full_logprobs or chunk.logprobs)[:used]
        self.behaviour_known = self.behaviour_known and chunk.behaviour_known
        self.versions += chunk.versions[:used]
        self.kept += chunk.kept[:used]
        self.most_likely += chunk.most_likely[:used]
        deltas = self.issue(pieces)
        finish = "stop" if self._text.stopped else chunk.finish
        return deltas if finish is None else [*deltas, *self.end(finish)]

    def end(self, finish: Finish) -> list[Delta]:
        if self.finish is not None:
            return []
        self.finish = finish
        pieces = self._text.finish()
        second = self._second_call(pieces)
        deltas = self.issue(pieces[:second])
        if second < len(pieces):
            self._cut()
        return deltas

    def _add_until_second_call(self, chunk: SampledChunk) -> list[Delta]:
        deltas: list[Delta] = []
        self.behaviour_known = self.behaviour_known and chunk.behaviour_known
        for place, token_id in enumerate(chunk.ids):
            _, pieces = self._text.push([token_id])
            self.ids.append(token_id)
            self.logprobs.append(chunk.logprobs[place])
            self.full_logprobs.append((chunk.full_logprobs or chunk.logprobs)[place])
            self.versions.append(chunk.versions[place])
            self.kept += chunk.kept[place : place + 1]
            self.most_likely += chunk.most_likely[place : place + 1]
            second = self._second_call(pieces)
            deltas += self.issue(pieces[:second])
            if second < len(pieces):
                self._cut()
                return deltas
            if self._text.stopped:
                return [*deltas, *self.end("stop")]
        return deltas if chunk.finish is None else [*deltas, *self.end(chunk.finish)]

    def _second_call(self, pieces: Sequence[Piece]) -> int:
        """The place of the piece that begins a call after the first; the number of pieces if none does."""
        calls = len(self.calls)
        for place, piece in enumerate(pieces if self._one_call else ()):
            calls += isinstance(piece, ToolCall)
            if calls > 1:
                return place
        return len(pieces)

    def _cut(self) -> None:
        """End the reply with the last token after which the same was said and the second call had not begun."""
        said, size = self.message(), len(self.ids) - 1
        while size and not self._says(self.ids[:size], said):
            size -= 1
        for column in (self.ids, self.logprobs, self.full_logprobs, self.versions, self.kept, self.most_likely):
            del column[size:]
        self.finish, self.is_cut = "stop", True

    def _says(self, ids: Sequence[int], said: Message) -> bool:
        """Whether these tokens alone are a reply with the same calls and, white space aside, the same text."""
        text = self._make_text()
        alone = SampledReply(lambda: text, seed=self._seed, prefill=self._prefill)
        alone.issue([*text.push(ids).pieces, *text.finish()])
        again = alone.message()
        same = [(message.get("tool_calls"), (message["content"] or "").strip()) for message in (again, said)]
        return same[0] == same[1]

    def issue(self, pieces: Sequence[Piece]) -> list[Delta]:
        """Add parsed pieces; returns what the agent sees of them."""
        deltas: list[Delta] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                deltas.append(self.add_call(*piece))
            elif isinstance(piece, Arguments):
                deltas.append(self.add_arguments(piece.text))
            else:
                deltas.append(self.add_text(piece))
        return deltas


def tool_call(call: CallDelta) -> dict[str, Any]:
    """A tool call in the OpenAI form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def deltas_of(message: Message) -> list[Delta]:
    """A recorded reply as the deltas of one chunk."""
    deltas: list[Delta] = [Reasoning(message["reasoning_content"])] if message.get("reasoning_content") else []
    if message["content"]:
        deltas.append(Text(message["content"]))
    for ordinal, call in enumerate(message.get("tool_calls") or ()):
        deltas.append(CallDelta(ordinal, call["id"], call["function"]["name"], call["function"]["arguments"]))
    return deltas


def sse_data(event: Any) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
