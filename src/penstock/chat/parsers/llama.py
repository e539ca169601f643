"""Llama 3 tool calls: the reply itself is `{"name": …, "parameters": {…}}`, or that follows `<|python_tag|>`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, read_call
from penstock.records import Message

TAG = "<|python_tag|>"


class Llama(BaseToolFormat):
    special: tuple[str, ...] = (TAG,)
    ends: tuple[str, ...] = ("<|eot_id|>", "<|eom_id|>")
    end: tuple[str, ...] | None = ("}",)

    def matches(self, template: str) -> bool:
        return "<|start_header_id|>" in template and '"parameters"' in template

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """The template takes one call per message: several become several messages, each followed by its result."""
        return list(_one_at_a_time(messages))

    def begin(self, name: str) -> str:
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters":' if name else '{"name": "'

    def parser(self, options: ParseOptions) -> "LlamaParser":
        return LlamaParser(options)


class LlamaParser(CallParser):
    """Calls are at the beginning of the reply or after the tag; several follow each other, with or without semicolons."""

    opens: tuple[str, ...] = (TAG,)

    def first_calls(self) -> Read[None]:
        self.source.mark()
        if (yield from self.source.peek()) == "{":
            yield from self.calls("")
        else:
            self.source.rewind()

    def calls(self, opener: str) -> Read[bool]:
        first = good = yield from self.attempt(self._call)
        while good:
            self.source.mark()
            yield from self.source.token(";")
            if (yield from self.source.peek()) != "{":
                self.source.rewind()
                break
            good = yield from self.attempt(self._call)
        return first

    def _call(self, call: PartialCall) -> Read[bool]:
        return read_call(self.source, call, strict=True)


def _one_at_a_time(messages: Sequence[Message]) -> Iterator[Message]:
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    yielded: set[Any] = set()
    for message in messages:
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if len(calls) < 2:
            if message["role"] != "tool" or message.get("tool_call_id") not in yielded:
                yield message
            continue
        for index, call in enumerate(calls):
            yield {**message, "content": message.get("content") if index == 0 else "", "tool_calls": [call]}
            if call["id"] in results:
                yielded.add(call["id"])
                yield results[call["id"]]
