"""The harmony form of gpt-oss: a reply is a row of messages on channels, framed by special tokens.

`analysis` is reasoning, `final` is text, and `commentary` is a tool call where it is addressed to one of the functions.
"""

import re
from collections.abc import Callable, Sequence

from penstock.chat.parsers.base import (
    BaseToolFormat,
    CallParser,
    ParseOptions,
    PartialCall,
    Read,
    ReplyParser,
    overlap,
    read_object,
)
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

    def matches(self, template: str) -> bool:
        """Whether the template has channels."""
        return CHANNEL in template and MESSAGE in template

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """The template takes reasoning before a call only where there is no text."""
        return [_text_or_thought(message) for message in messages]

    def begin(self, name: str) -> str:
        """Up to where the arguments, or the name, come."""
        return f"{CHANNEL}commentary to=functions.{name}" + (f" {CONSTRAIN}json{MESSAGE}" if name else "")

    def parser(self, reading: ParseOptions) -> ReplyParser:
        return HarmonyParser(reading)


class HarmonyParser(CallParser):
    """What has no header is text, up to the next one."""

    def reply(self) -> Read[None]:
        """Read the whole reply, whose first header the prompt has begun."""
        source = self.source
        while (yield from source.more()):
            source.mark()
            header = yield from self._header()
            channel, function = ON_CHANNEL.search(header), TO_FUNCTION.search(header)
            if header and not function:
                source.release()
                analysis = channel is not None and channel.group(1) == "analysis"
                yield from self._body(self.think if analysis else self.say)
            elif not function or not (yield from self._called(function.group(1))):
                source.rewind()
                yield from self._body(self.say, least=len(header) or 1)

    def _header(self) -> Read[str]:
        """Read up to where a message begins; nothing where this cannot be a header."""
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

    def _called(self, name: str) -> Read[bool]:
        """Read the body of a call, if calls are wanted."""

        def read(draft: PartialCall) -> Read[bool]:
            draft.named(name)
            whole = yield from read_object(self.source, draft.grow)
            yield from self.source.peek()
            closed = yield from self._one_of(*CLOSERS)
            return whole and bool(closed or self.source.is_spent)

        return self.reading.calls and (yield from self.attempt(read))

    def _body(self, give: Callable[[str], None], *, least: int = 0) -> Read[None]:
        """Give out text up to where a message ends or another begins, though `least` characters."""
        source = self.source
        while True:
            rest = source.text[source.at :]
            found = BOUNDARY.search(rest, least)
            held = 0 if source.ended or "<" not in rest else max(overlap(rest[least:], token) for token in BOUNDARIES)
            text = source.take(found.start() if found else len(rest) - held)
            least = max(0, least - len(text))
            if text:
                give(text)
            if found and found.group() in CLOSERS:
                source.take(len(found.group()))
            if found or source.ended:
                return
            yield


def _text_or_thought(message: Message) -> Message:
    if not message.get("tool_calls") or not flatten(message.get("content")):
        return message
    return {key: value for key, value in message.items() if key != "reasoning_content"}
