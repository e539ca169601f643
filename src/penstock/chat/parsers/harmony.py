"""Harmony, the format of gpt-oss: a reply is a sequence of messages on channels, framed by special tokens.

`analysis` is reasoning, `final` is text, and `commentary` is a tool call if it is addressed to a function.
"""

import re
from collections.abc import Callable, Sequence

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, overlap, read_object
from penstock.chat.templates import flatten
from penstock.records import Message

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CLOSERS = (END, CALL, RETURN)
BOUNDARIES = (*CLOSERS, START, CHANNEL)
BOUNDARY = re.compile("|".join(map(re.escape, BOUNDARIES)))
PLAIN = re.compile(r"[^<\n]*")
ON_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
TO_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


class Harmony(BaseToolFormat):
    special: tuple[str, ...] = (START, CHANNEL, CONSTRAIN, MESSAGE, *CLOSERS)
    ends: tuple[str, ...] = (RETURN, CALL)
    end: tuple[str, ...] | None = ()
    answer_prefix: str = f"{CHANNEL}final{MESSAGE}"

    def matches(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """The template refuses a call with both reasoning and text; the reasoning is dropped."""
        return [_drop_reasoning(message) for message in messages]

    def begin(self, name: str) -> str:
        return f"{CHANNEL}commentary to=functions.{name}" + (f" {CONSTRAIN}json{MESSAGE}" if name else "")

    def parser(self, options: ParseOptions) -> "HarmonyParser":
        return HarmonyParser(options)


class HarmonyParser(CallParser):
    """Text without a header is emitted as text, up to the next header."""

    def reply(self) -> Read[None]:
        """The prompt ends inside the first header, so the reply begins with the rest of it."""
        source = self.source
        while (yield from source.more()):
            source.mark()
            header = yield from self._header()
            channel, function = ON_CHANNEL.search(header), TO_FUNCTION.search(header)
            if header and not function:
                source.release()
                analysis = channel is not None and channel.group(1) == "analysis"
                yield from self._body(self.emit_reasoning if analysis else self.emit_text)
            elif not function or not (yield from self._call(function.group(1))):
                source.rewind()
                yield from self._body(self.emit_text, least=len(header) or 1)

    def _header(self) -> Read[str]:
        """Read a header, up to where its message begins; empty if this is not a header."""
        parts = [(yield from self._one_of(START, CHANNEL, " to="))]
        while parts[-1]:
            parts.append((yield from self.source.run(PLAIN)))
            parts.append((yield from self._one_of(MESSAGE, CHANNEL, CONSTRAIN)))
            if parts[-1] == MESSAGE:
                return "".join(parts)
        return ""

    def _one_of(self, *tokens: str) -> Read[str]:
        for token in tokens:
            if (yield from self.source.token(token, after_spaces=False)):
                return token
        return ""

    def _call(self, name: str) -> Read[bool]:
        def read(call: PartialCall) -> Read[bool]:
            call.set_name(name)
            whole = yield from read_object(self.source, call.add_arguments)
            yield from self.source.peek()
            closed = yield from self._one_of(*CLOSERS)
            return whole and bool(closed or self.source.at_end)

        return self.options.calls and (yield from self.attempt(read))

    def _body(self, emit: Callable[[str], None], *, least: int = 0) -> Read[None]:
        """Emit text up to where a message ends or another begins, but at least `least` characters."""
        source = self.source
        while True:
            rest = source.text[source.at :]
            found = BOUNDARY.search(rest, least)
            held = 0 if source.ended or "<" not in rest else max(overlap(rest[least:], token) for token in BOUNDARIES)
            text = source.take(found.start() if found else len(rest) - held)
            least = max(0, least - len(text))
            if text:
                emit(text)
            if found and found.group() in CLOSERS:
                source.take(len(found.group()))
            if found or source.ended:
                return
            yield


def _drop_reasoning(message: Message) -> Message:
    if not message.get("tool_calls") or not flatten(message.get("content")):
        return message
    return {key: value for key, value in message.items() if key != "reasoning_content"}
