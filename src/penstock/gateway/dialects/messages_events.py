"""A reply as Anthropic content blocks: whole, and as the events of a stream."""

from collections.abc import Sequence
from typing import Any

import orjson

from penstock.chat.parsers.base import Reasoning
from penstock.gateway.dialects.base import Answer, Fresh, Spelling
from penstock.gateway.dialects.messages_input import InputText, as_input
from penstock.gateway.stream import CallDelta, Delta, deltas_of
from penstock.records import Message, Step

EMPTY: dict[str, Any] = {"type": "text", "text": ""}
"""What an empty reply is: clients read the first block without looking."""


class MessagesEvents:
    """See `EventWriter`. One block is open at a time; what does not belong to it closes it."""

    def __init__(self, answer: Answer, tokenizer: Spelling) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._index = -1
        self._open = ""
        """The kind of the open block; empty where none is."""
        self._input = InputText()
        """Of the open call."""

    def opening(self) -> bytes:
        """See `EventWriter.opening`."""
        return event("message_start", message=head(self._answer) | {"usage": usage(self._answer, [])})

    def grown(self, choice: int, deltas: list[Delta], fresh: Fresh) -> bytes:
        """See `EventWriter.grown`."""
        return b"".join([self._grow(delta) for delta in deltas])

    def closing(self, choice: int, step: Step, fresh: Fresh) -> bytes:
        """See `EventWriter.closing`."""
        begun = self._begin(EMPTY) if self._index < 0 else b""
        reason, used = stop(step, self._tokenizer), usage(self._answer, [step])
        return begun + self._close(cut=step.finish == "length") + event("message_delta", delta=reason, usage=used)

    def ending(self, steps: list[Step]) -> bytes:
        """See `EventWriter.ending`."""
        return event("message_stop")

    def _grow(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            begun = self._begin(_call(delta, {})) if delta.begins else b""
            return begun + self._delta("input_json_delta", "partial_json", self._input.push(delta.arguments))
        if isinstance(delta, Reasoning):
            begun = b"" if self._open == "thinking" else self._begin({"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._delta("thinking_delta", "thinking", delta.text)
        begun = b"" if self._open == "text" else self._begin(EMPTY)
        return begun + self._delta("text_delta", "text", delta.text)

    def _begin(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._index += 1
        self._open = block["type"]
        self._input = InputText()
        return closed + event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, key: str, value: str) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, key: value}) if value else b""

    def _close(self, *, cut: bool = False) -> bytes:
        """End the open block; `cut` says that the reply was cut short in it."""
        if not self._open:
            return b""
        rest = b""
        if self._open == "thinking":
            rest = self._delta("signature_delta", "signature", signature(self._answer))
        elif self._open == "tool_use":
            rest = self._delta("input_json_delta", "partial_json", self._input.finish(cut=cut))
        self._open = ""
        return rest + event("content_block_stop", index=self._index)


def event(kind: str, **content: Any) -> bytes:
    """One event, under its name."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **content}) + b"\n\n"


def head(answer: Answer) -> dict[str, Any]:
    """What an answer and its first event share; nothing said yet."""
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def content(answer: Answer, message: Message) -> list[dict[str, Any]]:
    """A reply's blocks: thinking, text, calls."""
    blocks: list[dict[str, Any]] = []
    for delta in deltas_of(message):
        if isinstance(delta, CallDelta):
            blocks.append(_call(delta, as_input(delta.arguments)))
        elif isinstance(delta, Reasoning):
            blocks.append({"type": "thinking", "thinking": delta.text, "signature": signature(answer)})
        else:
            blocks.append({"type": "text", "text": delta.text})
    return blocks or [EMPTY]


def stop(step: Step, tokenizer: Spelling) -> dict[str, str | None]:
    """Why the reply ended. Calls go first: whatever ended the reply, they must be answered."""
    if step.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if step.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    found = _stop_string(step, tokenizer)
    return {"stop_reason": "end_turn" if found is None else "stop_sequence", "stop_sequence": found}


def usage(answer: Answer, steps: Sequence[Step]) -> dict[str, int]:
    """Tokens read and sampled; how many of them an engine had cached is not told."""
    used, cached = answer.usage(steps), {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": used.prompt_tokens, **cached, "output_tokens": used.completion_tokens}


def signature(answer: Answer) -> str:
    """Something to send back with thinking: clients drop thinking that is not signed."""
    return f"penstock:{answer.id}"


def _call(call: CallDelta, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _stop_string(step: Step, tokenizer: Spelling) -> str | None:
    """The stop string that ended the reply, which the record has and the text has not; None where the model itself ended it."""
    if not step.sampling.stop or (step.completion_ids and step.completion_ids[-1] in step.sampling.stop_ids):
        return None
    sampled = tokenizer.decode(step.completion_ids)
    found = [(place, each) for each in step.sampling.stop if (place := sampled.find(each)) >= 0]
    return min(found)[1] if found else None
