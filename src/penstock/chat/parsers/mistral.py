"""Mistral tool calls after `[TOOL_CALLS]`: a JSON list in older models, `name[ARGS]{…}` for each call in newer ones."""

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, read_call, read_object
from penstock.records import Message

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME = re.compile(r"[^\s\[\]{}]*")
VALID_ID = re.compile(r"[a-zA-Z0-9]{9}")


class Mistral(BaseToolFormat):
    special: tuple[str, ...] = (CALLS, ARGS, CALL_ID, "[THINK]", "[/THINK]")
    opener: str = CALLS
    end: tuple[str, ...] | None = ("}", "]")

    def matches(self, template: str) -> bool:
        return CALLS in template and ARGS not in template

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """The template requires call ids of nine letters or digits; others are replaced by a hash of the same length."""
        return [_with_valid_ids(message) for message in messages]

    def begin(self, name: str) -> str:
        return f'{CALLS}[{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":' if name else f'{CALLS}[{{"name": "'

    def parser(self, options: ParseOptions) -> "MistralParser":
        return MistralParser(options)


class MistralNamed(Mistral):
    end: tuple[str, ...] | None = ()
    repeats: bool = True

    def matches(self, template: str) -> bool:
        return CALLS in template and ARGS in template

    def begin(self, name: str) -> str:
        return f"{CALLS}{name}{ARGS}" if name else CALLS


class MistralParser(CallParser):
    """Reads both forms; a list begins with a bracket."""

    opens: tuple[str, ...] = (CALLS,)

    def calls(self, opener: str) -> Read[bool]:
        if not (yield from self.source.token("[")):
            return (yield from self.attempt(self._named))
        first = good = yield from self.attempt(self._listed)
        while good:
            self.source.mark()
            if not (yield from self.source.token(",")):
                self.source.release()
                yield from self.source.token("]")
                break
            good = yield from self.attempt(self._listed)
        return first

    def _listed(self, call: PartialCall) -> Read[bool]:
        return read_call(self.source, call)

    def _named(self, call: PartialCall) -> Read[bool]:
        yield from self.source.peek()
        name = yield from self.source.run(NAME)
        if not name:
            return False
        if (yield from self.source.token(CALL_ID)):
            yield from self.source.run(NAME)
        yield from self.source.token(ARGS)
        call.set_name(name)
        return (yield from read_object(self.source, call.add_arguments))


def _with_valid_ids(message: Message) -> Message:
    if message["role"] == "tool" and message.get("tool_call_id"):
        return {**message, "tool_call_id": _valid_id(message["tool_call_id"])}
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    return {**message, "tool_calls": [{**call, "id": _valid_id(call["id"])} for call in calls]} if calls else message


def _valid_id(call_id: str) -> str:
    if VALID_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]
