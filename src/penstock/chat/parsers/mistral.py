"""Tool calls of Mistral models after `[TOOL_CALLS]`: a JSON list in older ones, `name[ARGS]{…}` for each call in newer ones."""

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from penstock.chat.parsers.base import (
    BaseToolFormat,
    CallParser,
    ParseOptions,
    PartialCall,
    Read,
    ReplyParser,
    read_call,
    read_object,
)
from penstock.records import Message

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME = re.compile(r"[^\s\[\]{}]*")
FITTING_ID = re.compile(r"[a-zA-Z0-9]{9}")


class Mistral(BaseToolFormat):
    special: tuple[str, ...] = (CALLS, ARGS, CALL_ID, "[THINK]", "[/THINK]")

    def matches(self, template: str) -> bool:
        """Whether the template writes calls as a list."""
        return CALLS in template and ARGS not in template

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Ids of calls have nine letters or digits; others are replaced, always by the same."""
        return [_with_fitting_ids(message) for message in messages]

    def begin(self, name: str) -> str:
        """Up to where the arguments, or the name, come."""
        return f'{CALLS}[{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":' if name else f'{CALLS}[{{"name": "'

    def parser(self, reading: ParseOptions) -> ReplyParser:
        """A fresh parser; it reads both forms."""
        return MistralParser(reading)


class MistralNamed(Mistral):
    def matches(self, template: str) -> bool:
        """Whether the template writes the name before the arguments."""
        return CALLS in template and ARGS in template

    def begin(self, name: str) -> str:
        """Up to where the arguments, or the name, come."""
        return f"{CALLS}{name}{ARGS}" if name else CALLS


class MistralParser(CallParser):
    """Both forms, told apart by what follows the token."""

    opens: tuple[str, ...] = (CALLS,)

    def calls(self, opener: str) -> Read[bool]:
        """All calls of a list, or the one that is named."""
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

    def _listed(self, draft: PartialCall) -> Read[bool]:
        return read_call(self.source, draft)

    def _named(self, draft: PartialCall) -> Read[bool]:
        yield from self.source.peek()
        name = yield from self.source.run(NAME)
        if not name:
            return False
        if (yield from self.source.token(CALL_ID)):
            yield from self.source.run(NAME)
        yield from self.source.token(ARGS)
        draft.named(name)
        return (yield from read_object(self.source, draft.grow))


def _with_fitting_ids(message: Message) -> Message:
    if message["role"] == "tool" and message.get("tool_call_id"):
        return {**message, "tool_call_id": _fitting(message["tool_call_id"])}
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    return {**message, "tool_calls": [{**call, "id": _fitting(call["id"])} for call in calls]} if calls else message


def _fitting(call_id: str) -> str:
    if FITTING_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]
