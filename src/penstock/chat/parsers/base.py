"""Incremental parsing of replies: what all tool formats share.

A grammar is written as generators that yield when they need more text (`Read`). What a read decides depends on the text alone,
never on how it was cut into pushes: while more text could change the answer, it waits.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import NamedTuple, Protocol, TypeVar

import orjson

from penstock.chat.templates import Tool
from penstock.records import Message

T = TypeVar("T")

Read = Generator[None, None, T]
"""A read in progress; its return value is what was read."""


# Text


SPACES = re.compile(r"\s*")


class TextSource:
    """Received text and the position up to which it is read. Text after a mark is kept, so that a malformed call can be unread."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """Where the unread part of `text` begins."""
        self.ended = False
        """Whether all text has come."""
        self._marked: list[str] | None = None
        self._mark = 0

    def feed(self, text: str) -> None:
        """Add text. What is already read is dropped, or kept if there is a mark."""
        if self._marked is not None:
            self._marked.append(self.text[self._mark : self.at])
        self.text = self.text[self.at :] + text
        self.at = self._mark = 0

    def mark(self) -> None:
        """Keep what is read from here on."""
        self._marked, self._mark = [], self.at

    def release(self) -> None:
        """Remove the mark."""
        self._marked = None

    def rewind(self) -> None:
        """Unread everything since the mark; does nothing without one."""
        if self._marked is not None:
            self.text = "".join(self._marked) + self.text[self._mark :]
            self.at, self._marked = 0, None

    @property
    def at_end(self) -> bool:
        """Whether nothing but white space is left."""
        return self.ended and _after_spaces(self.text, self.at) == len(self.text)

    def take(self, size: int) -> str:
        """Read the next `size` characters, which must have come."""
        self.at += size
        return self.text[self.at - size : self.at]

    def more(self) -> Read[bool]:
        """Wait for unread text; False if there is none left."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Read[str]:
        """Read white space and return the character after it, unread; empty at the end."""
        while (yield from self.more()):
            self.at = _after_spaces(self.text, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
        return ""

    def run(self, chars: re.Pattern[str]) -> Read[str]:
        """Read the characters that `chars` matches; the pattern must also match the empty string."""
        parts: list[str] = []
        while (yield from self.more()):
            match = chars.match(self.text, self.at)
            assert match is not None
            parts.append(match.group())
            self.at = match.end()
            if self.at < len(self.text):
                break
        return "".join(parts)

    def token(self, wanted: str, *, after_spaces: bool = True) -> Read[bool]:
        """Read `wanted` and white space before it; False, and nothing is read, if something else comes."""
        while True:
            start = _after_spaces(self.text, self.at) if after_spaces else self.at
            if self.text.startswith(wanted, start):
                self.at = start + len(wanted)
                return True
            if self.ended or not wanted.startswith(self.text[start : start + len(wanted)]):
                return False
            yield

    def until(self, marker: str, emit: Callable[[str], None], *, trim: Callable[[str], str]) -> Read[bool]:
        """Emit the text before `marker`, and read the marker; False if it never comes.

        `trim` removes white space that belongs to the marker.
        """
        while True:
            rest = self.text[self.at :]
            found = rest.find(marker)
            if found < 0 and self.ended:
                _emit(self.take(len(rest)), emit)
                return False
            cut = trim(rest[: found if found >= 0 else len(rest) - overlap(rest, marker)])
            _emit(self.take(len(cut)), emit)
            if found >= 0:
                self.take(found + len(marker) - len(cut))
                return True
            yield


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that `text` ends with."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[0], start + 1)
    return len(text) - start if start >= 0 else 0


def _emit(text: str, emit: Callable[[str], None]) -> None:
    if text:
        emit(text)


def _after_spaces(text: str, at: int) -> int:
    match = SPACES.match(text, at)
    return match.end() if match else at


# Results and interfaces


class Text(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str
    signature: str = ""
    """By which an endpoint knows its own reasoning again; it comes after the text."""


class ToolCall(NamedTuple):
    """The beginning of a call: its name, and its arguments so far."""

    name: str
    arguments: str
    """JSON text of an object, as the model wrote it, or its beginning."""


class Arguments(NamedTuple):
    """More of the arguments of the last call."""

    text: str


Piece = Text | Reasoning | ToolCall | Arguments


class ReasoningTags(NamedTuple):
    """The tags around a model's reasoning, such as `<think>` and `</think>`."""

    opening: str
    closing: str


class ParseOptions(NamedTuple):
    calls: bool
    """Whether calls are parsed; otherwise their markup is text."""
    eager: bool
    """Whether arguments are emitted while they are written; a call that turns out malformed then stays a call. Otherwise a call is
    emitted whole, and a malformed one is text."""
    tags: ReasoningTags | None = None
    """None if the model writes no reasoning, or its format parses it itself."""
    thinking: bool = False
    """Whether the prompt ends inside reasoning."""
    tools: Sequence[Tool] = ()
    """The tools offered. Formats that write arguments without JSON need the schemas to distinguish strings from numbers."""


class ReplyParser(Protocol):
    """Sampled text to pieces. However the text is cut into pushes, the pieces add up to the same."""

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain; markup that may become a call is kept back."""
        ...

    def finish(self) -> list[Piece]:
        """Return what was kept back; an unfinished call is text."""
        ...


class ToolFormat(Protocol):
    """One way in which models write tool calls. `TOOL_FORMATS` lists all of them; the first whose `matches` is true is used."""

    special: tuple[str, ...]
    """Special tokens of the markup, which the parser must see as text."""
    ends: tuple[str, ...]
    """Special tokens that end a reply; if empty, the token that ends a turn in the template."""
    opener: str
    """The markup that calls begin with, anywhere in the text; empty if there is none."""
    end: tuple[str, ...] | None
    """What follows the arguments of the last call, with white space between; None if arguments are not written as JSON."""
    repeats: bool
    """Whether another call may follow one that is complete."""
    answer_prefix: str
    """The markup before an answer that is no call."""

    def matches(self, template: str) -> bool:
        """Whether this template, which renders tools, asks for calls in this format."""
        ...

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the family's template requires them, such as call ids of a certain length."""
        ...

    def begin(self, name: str) -> str | None:
        """The beginning of a call of this tool (of any, if the name is empty), to force a call; None if that is impossible."""
        ...

    def parser(self, options: ParseOptions) -> ReplyParser:
        """A new parser for one reply."""
        ...


class BaseToolFormat:
    """Defaults for `ToolFormat`."""

    special: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    opener: str = ""
    end: tuple[str, ...] | None = None
    repeats: bool = False
    answer_prefix: str = ""

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages)


# Parser


NEWLINES = re.compile(r"\n*")


class PartialCall:
    """A call that is being read: emitted as it grows if `eager`, else kept until it is complete."""

    def __init__(self, source: TextSource, emit: Callable[[Piece], None], *, eager: bool) -> None:
        self.emitted = False
        self._source = source
        self._emit = emit
        self._eager = eager
        self._name = ""
        self._parts: list[str] = []

    def set_name(self, name: str) -> None:
        self._name = name
        if self._parts:
            self.add_arguments("")

    def add_arguments(self, text: str) -> None:
        if self.emitted:
            self._emit(Arguments(text))
            return
        self._parts.append(text)
        if self._eager and self._name:
            self.emitted = True
            self._source.release()
            self._emit(ToolCall(self._name, "".join(self._parts)))

    def finished(self) -> ToolCall | None:
        """The complete call; None if its arguments are not a JSON object."""
        arguments = "".join(self._parts)
        try:
            good = isinstance(orjson.loads(arguments), dict)
        except ValueError:
            good = False
        return ToolCall(self._name, arguments) if good and self._name else None


class CallParser:
    """Base of the parsers. White space before a call, and after the last one, is dropped."""

    opens: tuple[str, ...] = ()
    """Markup that opens a call, anywhere in the text."""

    def __init__(self, options: ParseOptions) -> None:
        self.source = TextSource()
        self.options = options
        self._opens = self.opens if options.calls else ()
        self._opening = _alternatives(self._opens)
        self._pieces: list[Piece] = []
        self._after_call = False
        self._reply = self.reply()
        next(self._reply)

    def push(self, text: str) -> list[Piece]:
        self.source.feed(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        self.source.ended = True
        return self._advance()

    def reply(self) -> Read[None]:
        if self.options.tags is not None:
            yield from self._read_reasoning(*self.options.tags)
        if self.options.calls:
            yield from self.first_calls()
        while head := (yield from self._read_text()):
            if not (yield from self.calls(head.lstrip())):
                self.emit_text(self.source.take(len(head)))

    def first_calls(self) -> Read[None]:
        """Read calls at the beginning of the text, in formats that have no opening markup."""
        yield from ()

    def calls(self, opener: str) -> Read[bool]:
        """Read the calls after `opener`; False, and everything since the mark is unread, if there are none."""
        yield from ()
        return False

    def attempt(self, read: Callable[[PartialCall], Read[bool]]) -> Read[bool]:
        """Read one call; if it is malformed, unread everything since the mark and return False."""
        call = PartialCall(self.source, self._emit, eager=self.options.eager)
        good = yield from read(call)
        if not call.emitted:
            call = call.finished() if good else None
            if call is None:
                self.source.rewind()
                return False
            self.source.release()
            self._emit(call)
        self._after_call = True
        return True

    def emit_text(self, text: str) -> None:
        if text:
            self._emit(Text(text))
            self._after_call = False

    def emit_reasoning(self, text: str) -> None:
        self._emit(Reasoning(text))

    def _emit(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def _advance(self) -> list[Piece]:
        next(self._reply, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read_reasoning(self, opening: str, closing: str) -> Read[None]:
        """Read reasoning, if the reply begins with it or the prompt opened it; newlines around it are markup."""
        source = self.source
        if (yield from source.token(opening)) or self.options.thinking:
            yield from source.run(NEWLINES)
            yield from source.until(closing, self.emit_reasoning, trim=_trim_newlines)
        elif not (yield from source.token(closing)):
            return
        yield from source.run(NEWLINES)

    def _read_text(self) -> Read[str]:
        """Emit text up to the next opener. Returns the opener with the white space before it, read and marked; empty at the end."""
        source = self.source
        while True:
            rest = source.text[source.at :]
            found = self._opening.search(rest) if self._opens else None
            if found:
                text = rest[: found.start()].rstrip()
                self.emit_text(source.take(len(text)))
                source.mark()
                return source.take(found.end() - len(text))
            if source.ended:
                self.emit_text("" if self._after_call and rest.isspace() else rest)
                return ""
            self.emit_text(source.take(self._emittable(rest)))
            yield

    def _emittable(self, rest: str) -> int:
        """How much of `rest` cannot be the beginning of an opener, or white space before one."""
        if not self._opens:
            return len(rest)
        held = max(overlap(rest, opener) for opener in self._opens)
        return len(rest[: len(rest) - held].rstrip())


@cache
def _alternatives(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def _trim_newlines(text: str) -> str:
    return text.rstrip("\n")


# Reasoning tags


KNOWN_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


def find_reasoning_tags(template: str) -> ReasoningTags | None:
    """The reasoning tags in a template; None if it has none."""
    return next((tags for tags in KNOWN_TAGS if tags.opening in template or tags.closing in template), None)


def opens_reasoning(prompt: str, tags: ReasoningTags | None) -> bool:
    """Whether `prompt` ends by opening reasoning."""
    return tags is not None and prompt.rstrip().endswith(tags.opening)


def close_reasoning(tags: ReasoningTags) -> str:
    """The text that closes reasoning which the prompt has opened."""
    return f"\n{tags.closing}\n\n"


# JSON values


OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

BARE = re.compile(r"[^\s,:{}\[\]\"]*")

ARGUMENTS = ("arguments", "parameters")


class _Nesting:
    """Finds the end of a JSON string, array or object in text that comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def end(self, text: str, at: int) -> int:
        """The position after the value's end; -1 if `text` does not reach it."""
        if self._escaped:
            at, self._escaped = at + 1, False
        while found := (INSIDE if self._quoted else OUTSIDE).search(text, at):
            char, at = found.group(), found.end()
            if char == "\\":
                self._escaped = at == len(text)
                at += 1
            elif char == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if char in "{[" else -1
            if not self._depth and not self._quoted:
                return at
        return -1


def read_value(source: TextSource, emit: Callable[[str], None]) -> Read[bool]:
    """Read one value and emit its text as it comes; False if it never ends. Its inside is not validated."""
    if (yield from source.peek()) not in ('"', "{", "["):
        text = yield from source.run(BARE)
        if text:
            emit(text)
        return bool(text)
    nesting = _Nesting()
    while (yield from source.more()):
        end = nesting.end(source.text, source.at)
        emit(source.take((end if end >= 0 else len(source.text)) - source.at))
        if end >= 0:
            return True
    return False


def read_object(source: TextSource, emit: Callable[[str], None]) -> Read[bool]:
    """Read one object; False if something else comes."""
    return (yield from source.peek()) == "{" and (yield from read_value(source, emit))


def read_string(source: TextSource) -> Read[str]:
    """Read one string; empty if there is none."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from read_value(source, parts.append)):
        return ""
    try:
        return orjson.loads("".join(parts))
    except ValueError:
        return ""


def read_call(source: TextSource, call: "PartialCall", *, strict: bool = False) -> Read[bool]:
    """Read `{"name": …, "arguments": {…}}`, in any order; other members are skipped, or refused if `strict`.

    False as soon as it is malformed. A second name, or second arguments, are malformed.
    """
    seen: set[str] = set()
    if not (yield from source.token("{")):
        return False
    while True:
        key = yield from read_string(source)
        role = "arguments" if key in ARGUMENTS else key
        if not key or role in seen or not (yield from source.token(":")):
            return False
        seen.add(role)
        if not (yield from _read_member(source, call, role, strict=strict)):
            return False
        if not (yield from source.token(",")):
            return (yield from source.token("}")) and seen >= {"name", "arguments"}


def _read_member(source: TextSource, call: "PartialCall", role: str, *, strict: bool) -> Read[bool]:
    if role == "arguments":
        return (yield from read_object(source, call.add_arguments))
    if role == "name":
        name = yield from read_string(source)
        call.set_name(name)
        return bool(name)
    parts: list[str] = []
    known = not strict or role in ("id", "type")
    return known and (yield from read_value(source, parts.append)) and is_json("".join(parts))


def is_json(text: str) -> bool:
    """Whether `text` is strict JSON: no NaN, no lone surrogates."""
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True
