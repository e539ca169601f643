"""A Responses answer as events: each item is added, grows, and is done; then comes the next one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from penstock.chat.parsers.base import Reasoning
from penstock.gateway.dialects import responses_output as output
from penstock.gateway.dialects.base import Answer, Fresh, Spelling
from penstock.gateway.dialects.chat import logprobs
from penstock.gateway.dialects.responses_tools import FreeformReader, addresses
from penstock.gateway.stream import CallDelta, Delta
from penstock.records import Step

GROWTH = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""By type of item: what the events of its growth are called, and the key of what has grown when it is done."""

IN_PARTS = ("message", "reasoning")
"""Items whose text stands in a content part."""

Make = Callable[[str | None], dict[str, Any]]
"""An item, for what has been written of it; None: nothing yet."""


@dataclass(slots=True)
class _Open:
    """An item that grows."""

    make: Make
    id: str
    kind: str
    delta_head: bytes
    written: list[str] = field(default_factory=list[str])
    told: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Log-probabilities that its events have told."""
    reader: FreeformReader | None = None
    """Takes what is shown out of what is written, where that is not the same."""


class ResponseEvents:
    """See `EventWriter`."""

    def __init__(self, answer: Answer, tokenizer: Spelling) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._tools = addresses(dict(answer.call.echo).get("tools"))
        self._open: _Open | None = None
        self._done: list[dict[str, Any]] = []
        self._sent = 0

    def opening(self) -> bytes:
        """See `EventWriter.opening`."""
        begun = output.response(self._answer, "in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def grown(self, choice: int, deltas: list[Delta], fresh: Fresh) -> bytes:
        """See `EventWriter.grown`."""
        told: list[dict[str, Any]] = logprobs(self._tokenizer, *fresh)["content"] if self._answer.call.logprobs else []
        parts: list[bytes] = []
        for delta in deltas:
            written = delta.arguments if isinstance(delta, CallDelta) else delta.text
            if written or isinstance(delta, CallDelta):
                parts += self._turn_to(delta)
                parts += self._grow(written, told)
                told = []
        return b"".join(parts)

    def closing(self, choice: int, step: Step, fresh: Fresh) -> bytes:
        """See `EventWriter.closing`."""
        kinds = {item["type"] for item in self._done} | {self._open.kind if self._open else "reasoning"}
        parts = self._start(self._message()) if kinds == {"reasoning"} else []
        return b"".join([*parts, *self._finish(output.ending_status(step))])

    def ending(self, steps: list[Step]) -> bytes:
        """See `EventWriter.ending`."""
        (step,) = steps
        spoken = next((item for item in self._done if item["type"] == "message"), None)
        if spoken and self._answer.call.logprobs:
            spoken["content"][0]["logprobs"] = output.told(step, self._tokenizer)
        whole = output.finished(self._answer, step, self._done, self._tokenizer)
        return self._event(f"response.{whole['status']}", response=whole)

    def _turn_to(self, delta: Delta) -> list[bytes]:
        """Begin the item that `delta` belongs to, unless it is the open one."""
        kind = self._open.kind if self._open else None
        if isinstance(delta, CallDelta):
            return self._start(self._call(delta)) if delta.begins else []
        if isinstance(delta, Reasoning):
            return [] if kind == "reasoning" else self._start(self._reasoning())
        return [] if kind == "message" else self._start(self._message())

    def _message(self) -> Make:
        return partial(output.message_item, self._answer, self._count("message"))

    def _reasoning(self) -> Make:
        return partial(output.reasoning_item, self._answer, self._count("reasoning"))

    def _call(self, delta: CallDelta) -> Make:
        return partial(output.call_item, self._answer, delta.ordinal, delta.id, self._tools.get(delta.name), delta.name)

    def _count(self, kind: str) -> int:
        return sum(item["type"] == kind for item in self._done)

    def _start(self, make: Make) -> list[bytes]:
        parts, begun = self._finish({}), make(None)
        reader = FreeformReader() if begun["type"] == "custom_tool_call" else None
        self._open = _Open(make, begun["id"], begun["type"], self._delta_head(begun), reader=reader)
        parts.append(self._event("response.output_item.added", output_index=len(self._done), item=begun))
        if begun["type"] in IN_PARTS:
            parts.append(self._part_event("response.content_part.added", make("")))
        return parts

    def _delta_head(self, item: dict[str, Any]) -> bytes:
        """What its growth begins with, each time: all fields but the number and the text."""
        event, kind = f"response.{GROWTH[item['type']][0]}.delta", item["type"]
        body = {"type": event, "item_id": item["id"], "output_index": len(self._done), **_place_in(kind)}
        if kind == "message":
            body["logprobs"] = []
        return b"event: " + event.encode() + b"\ndata: " + orjson.dumps(body).removesuffix(b"}")

    def _grow(self, written: str, told: list[dict[str, Any]]) -> list[bytes]:
        item = self._open
        if item is None or not written:
            return []
        item.written.append(written)
        item.told += told
        shown = item.reader.push(written) if item.reader else written
        return [self._delta(item, shown, told)] if shown else []

    def _delta(self, item: _Open, shown: str, told: list[dict[str, Any]]) -> bytes:
        """The event that every few tokens make: all but the text is spelt beforehand, where nothing else changes."""
        if told and item.kind == "message":
            return self._growth(item, "delta", **_place_in(item.kind), logprobs=told, delta=shown)
        number, self._sent = self._sent, self._sent + 1
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (item.delta_head, number, orjson.dumps(shown))

    def _finish(self, status: dict[str, Any]) -> list[bytes]:
        """End the open item, if there is one."""
        item, parts = self._open, list[bytes]()
        if item is None:
            return parts
        if item.reader and (rest := item.reader.finish()):
            parts.append(self._delta(item, rest, []))
        made = item.make("".join(item.written)) | status
        extra = _place_in(item.kind)
        if item.kind == "message":
            made["content"][0]["logprobs"] = extra["logprobs"] = item.told
        key = GROWTH[item.kind][1]
        parts.append(self._growth(item, "done", **{key: made["content"][0][key] if item.kind in IN_PARTS else made[key]}, **extra))
        if item.kind in IN_PARTS:
            parts.append(self._part_event("response.content_part.done", made))
        parts.append(self._event("response.output_item.done", output_index=len(self._done), item=made))
        self._done.append(made)
        self._open = None
        return parts

    def _growth(self, item: _Open, event: str, **extra: Any) -> bytes:
        return self._event(f"response.{GROWTH[item.kind][0]}.{event}", item_id=item.id, output_index=len(self._done), **extra)

    def _part_event(self, event: str, item: dict[str, Any]) -> bytes:
        place = {"item_id": item["id"], "output_index": len(self._done), "content_index": 0}
        return self._event(event, **place, part=item["content"][0])

    def _event(self, event: str, **content: Any) -> bytes:
        body = {"type": event, "sequence_number": self._sent, **content}
        self._sent += 1
        return b"event: " + event.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


def _place_in(kind: str) -> dict[str, Any]:
    """Where an item's text stands, if that is in a content part."""
    return {"content_index": 0} if kind in IN_PARTS else {}
