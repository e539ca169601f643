"""Sampled text as it comes, read by grammars that are written straight down: a read is a generator that yields for more text.

What a read decides depends on the text alone, never on how it was cut: where more text could change the answer, it waits.
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
"""A read under way; its value is what was read."""

SPACES = re.compile(r"\s*")


class TextSource:
    """Text that has come and how far it is read. From a mark on it is kept, so that what turns out malformed can be unread."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """Where in `text` the unread part begins."""
        self.ended = False
        """Whether no more text comes."""
        self._kept: list[str] | None = None
        self._mark = 0

    def feed(self, text: str) -> None:
        """Add text; what is read already is let go, or kept where there is a mark."""
        if self._kept is not None:
            self._kept.append(self.text[self._mark : self.at])
        self.text = self.text[self.at :] + text
        self.at = self._mark = 0

    def mark(self) -> None:
        """Keep what is read from here on."""
        self._kept, self._mark = [], self.at

    def release(self) -> None:
        """Keep nothing any more."""
        self._kept = None

    def rewind(self) -> None:
        """Unread everything since the mark; nothing where it is let go."""
        if self._kept is not None:
            self.text = "".join(self._kept) + self.text[self._mark :]
            self.at, self._kept = 0, None

    @property
    def is_spent(self) -> bool:
        """Whether nothing comes any more, white space apart."""
        return self.ended and _after_spaces(self.text, self.at) == len(self.text)

    def take(self, size: int) -> str:
        """The next `size` characters of what is there, read."""
        self.at += size
        return self.text[self.at - size : self.at]

    def more(self) -> Read[bool]:
        """Wait for unread text; False where none comes."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Read[str]:
        """Read white space; the character after it, unread, or nothing at the end."""
        while (yield from self.more()):
            self.at = _after_spaces(self.text, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
        return ""

    def run(self, chars: re.Pattern[str]) -> Read[str]:
        """Read as long as the characters are of this kind; the pattern matches any number of them, and none."""
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
        """Read `wanted`, and white space before it; nothing is read where something else comes."""
        while True:
            start = _after_spaces(self.text, self.at) if after_spaces else self.at
            if self.text.startswith(wanted, start):
                self.at = start + len(wanted)
                return True
            if self.ended or not wanted.startswith(self.text[start : start + len(wanted)]):
                return False
            yield

    def until(self, marker: str, give: Callable[[str], None], *, trim: Callable[[str], str]) -> Read[bool]:
        """Give out the text before `marker`, and read that too; False where it never comes.

        `trim` takes off white space that belongs to the marker.
        """
        while True:
            rest = self.text[self.at :]
            found = rest.find(marker)
            if found < 0 and self.ended:
                _give_some(self.take(len(rest)), give)
                return False
            cut = trim(rest[: found if found >= 0 else len(rest) - overlap(rest, marker)])
            _give_some(self.take(len(cut)), give)
            if found >= 0:
                self.take(found + len(marker) - len(cut))
                return True
            yield


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with, short of all of it."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[0], start + 1)
    return len(text) - start if start >= 0 else 0


def _give_some(text: str, give: Callable[[str], None]) -> None:
    if text:
        give(text)


def _after_spaces(text: str, at: int) -> int:
    match = SPACES.match(text, at)
    return match.end() if match else at


OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
BARE = re.compile(r"[^\s,:{}\[\]\"]*")
ARGUMENTS = ("arguments", "parameters")


class CallSink(Protocol):
    """What a call is read into."""

    def named(self, name: str) -> None:
        """The call's name is known."""
        ...

    def grow(self, text: str) -> None:
        """More of its arguments has come."""
        ...


class _Nesting:
    """Where a JSON string, array or object ends, in text that comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def end(self, text: str, at: int) -> int:
        """The place after the value's end; -1 where `text` does not reach it."""
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


def read_value(source: TextSource, give: Callable[[str], None]) -> Read[bool]:
    """Read one value and give out its text as it comes; False where it never ends. What stands inside is not looked at."""
    if (yield from source.peek()) not in ('"', "{", "["):
        text = yield from source.run(BARE)
        if text:
            give(text)
        return bool(text)
    nesting = _Nesting()
    while (yield from source.more()):
        end = nesting.end(source.text, source.at)
        give(source.take((end if end >= 0 else len(source.text)) - source.at))
        if end >= 0:
            return True
    return False


def read_object(source: TextSource, give: Callable[[str], None]) -> Read[bool]:
    """Read one object; False where something else comes."""
    return (yield from source.peek()) == "{" and (yield from read_value(source, give))


def read_string(source: TextSource) -> Read[str]:
    """Read one string; empty where there is none."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from read_value(source, parts.append)):
        return ""
    try:
        return orjson.loads("".join(parts))
    except ValueError:
        return ""


def read_call(source: TextSource, draft: CallSink, *, strict: bool = False) -> Read[bool]:
    """Read `{"name": …, "arguments": {…}}`, in any order; other members are passed over, or refused if `strict`.

    False where it is malformed, at the first sign of it. A call may have no second name and no second arguments.
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
        if not (yield from _read_member(source, draft, role, strict=strict)):
            return False
        if not (yield from source.token(",")):
            return (yield from source.token("}")) and seen >= {"name", "arguments"}


def _read_member(source: TextSource, draft: CallSink, role: str, *, strict: bool) -> Read[bool]:
    if role == "arguments":
        return (yield from read_object(source, draft.grow))
    if role == "name":
        name = yield from read_string(source)
        draft.named(name)
        return bool(name)
    parts: list[str] = []
    known = not strict or role in ("id", "type")
    return known and (yield from read_value(source, parts.append)) and is_json("".join(parts))


def is_json(text: str) -> bool:
    """Whether `text` is JSON that everyone can read: no NaN, no lone surrogates."""
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


class Text(NamedTuple):
    """Text for the agent."""

    text: str


class Reasoning(NamedTuple):
    """What the model thinks before it speaks: shown apart from the text."""

    text: str


class ToolCall(NamedTuple):
    """A call begins: its name, and as much of its arguments as is known."""

    name: str
    arguments: str
    """JSON text of an object, as the model wrote it, or the beginning of it."""


class Arguments(NamedTuple):
    """More of the arguments of the call that began last."""

    text: str


Piece = Text | Reasoning | ToolCall | Arguments


class ReasoningTags(NamedTuple):
    """What stands around the reasoning of a model, such as `<think>` and `</think>`."""

    opening: str
    closing: str


class ParseOptions(NamedTuple):
    """How one reply is to be read."""

    calls: bool
    """Without, markup of calls is text."""
    eager: bool
    """Whether arguments are given out while they are written: a call that then turns out malformed stays a call. Otherwise a
    call comes whole, and one that is malformed is text."""
    marks: ReasoningTags | None = None
    """None where the model writes no reasoning, or has a form of its own for it."""
    thinking: bool = False
    """Whether the prompt's end has opened the reasoning."""
    tools: Sequence[Tool] = ()
    """What may be called: forms that write arguments without JSON need the schemas to tell a text from a number."""


class ReplyParser(Protocol):
    """Sampled text to pieces, as it comes. However the text is cut into pushes, the pieces add up to the same."""

    def push(self, text: str) -> list[Piece]:
        """What is certain now; markup that may yet become a call is kept back."""
        ...

    def finish(self) -> list[Piece]:
        """What was kept back: a call that was never finished is text."""
        ...


class ToolFormat(Protocol):
    """One way in which models that know tools write their reasoning and calls."""

    special: tuple[str, ...]
    """Special tokens that the markup is made of: the parser must see them as text."""
    ends: tuple[str, ...]
    """Special tokens that end a reply of this family; where there are none, what closes a turn in the template does."""

    def matches(self, template: str) -> bool:
        """Whether a chat template that renders tools itself asks for calls in this form."""
        ...

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as this family's own template takes them, such as ids of the length that it asks for."""
        ...

    def begin(self, name: str) -> str | None:
        """How a call of this tool (of any, where the name is empty) begins: what a forced call's prompt ends with. None: cannot."""
        ...

    def parser(self, reading: ParseOptions) -> ReplyParser:
        """A fresh parser for one reply."""
        ...


NEWLINES = re.compile(r"\n*")


class BaseToolFormat:
    """What most families share; see `ToolFormat`."""

    special: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Most templates take messages as they are."""
        return list(messages)


class PartialCall:
    """A call while it is read: given out as it grows, or kept until it is whole."""

    def __init__(self, source: TextSource, give: Callable[[Piece], None], *, eager: bool) -> None:
        self.given = False
        self._source = source
        self._give = give
        self._eager = eager
        self._name = ""
        self._parts: list[str] = []

    def named(self, name: str) -> None:
        self._name = name
        if self._parts:
            self.grow("")

    def grow(self, text: str) -> None:
        if self.given:
            self._give(Arguments(text))
            return
        self._parts.append(text)
        if self._eager and self._name:
            self.given = True
            self._source.release()
            self._give(ToolCall(self._name, "".join(self._parts)))

    def whole(self) -> ToolCall | None:
        """The call that was kept; None where its arguments are no JSON object."""
        arguments = "".join(self._parts)
        try:
            good = isinstance(orjson.loads(arguments), dict)
        except ValueError:
            good = False
        return ToolCall(self._name, arguments) if good and self._name else None


class CallParser:
    """See `ReplyParser`. White space before a call, and after the last one, belongs to nothing."""

    opens: tuple[str, ...] = ()
    """What a call may begin with, anywhere in the text."""

    def __init__(self, reading: ParseOptions) -> None:
        self.source = TextSource()
        self.reading = reading
        self._opens = self.opens if reading.calls else ()
        self._opening = _any_of(self._opens)
        self._pieces: list[Piece] = []
        self._after_call = False
        self._reply = self.reply()
        next(self._reply)

    def push(self, text: str) -> list[Piece]:
        self.source.feed(text)
        return self._go_on()

    def finish(self) -> list[Piece]:
        self.source.ended = True
        return self._go_on()

    def reply(self) -> Read[None]:
        """Read the whole reply."""
        if self.reading.marks is not None:
            yield from self._think(*self.reading.marks)
        if self.reading.calls:
            yield from self.first_calls()
        while head := (yield from self._speak()):
            if not (yield from self.calls(head.lstrip())):
                self.say(self.source.take(len(head)))

    def first_calls(self) -> Read[None]:
        """Read the calls that the text begins with, in forms that have no mark for them."""
        yield from ()

    def calls(self, opener: str) -> Read[bool]:
        """Read the calls that come after `opener`; False where there are none, and nothing is read since the mark before it."""
        yield from ()
        return False

    def attempt(self, read: Callable[[PartialCall], Read[bool]]) -> Read[bool]:
        """Read one call from the mark on; where it is none, all since the mark is unread again."""
        draft = PartialCall(self.source, self._give, eager=self.reading.eager)
        good = yield from read(draft)
        if not draft.given:
            call = draft.whole() if good else None
            if call is None:
                self.source.rewind()
                return False
            self.source.release()
            self._give(call)
        self._after_call = True
        return True

    def say(self, text: str) -> None:
        """Give out text for the agent."""
        if text:
            self._give(Text(text))
            self._after_call = False

    def think(self, text: str) -> None:
        self._give(Reasoning(text))

    def _give(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def _go_on(self) -> list[Piece]:
        next(self._reply, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _think(self, opening: str, closing: str) -> Read[None]:
        """Read reasoning, if the reply begins with it or the prompt has begun it; newlines around it are markup."""
        source = self.source
        if (yield from source.token(opening)) or self.reading.thinking:
            yield from source.run(NEWLINES)
            yield from source.until(closing, self.think, trim=_trim_newlines)
        elif not (yield from source.token(closing)):
            return
        yield from source.run(NEWLINES)

    def _speak(self) -> Read[str]:
        """Give out text up to what may open a call: that, read and marked, with the white space before it; nothing at the end."""
        source = self.source
        while True:
            rest = source.text[source.at :]
            found = self._opening.search(rest) if self._opens else None
            if found:
                text = rest[: found.start()].rstrip()
                self.say(source.take(len(text)))
                source.mark()
                return source.take(found.end() - len(text))
            if source.ended:
                self.say("" if self._after_call and rest.isspace() else rest)
                return ""
            self.say(source.take(self._certain(rest)))
            yield

    def _certain(self, rest: str) -> int:
        """How much of `rest` cannot be the beginning of an opener, or white space before one."""
        if not self._opens:
            return len(rest)
        held = max(overlap(rest, opener) for opener in self._opens)
        return len(rest[: len(rest) - held].rstrip())


@cache
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def _trim_newlines(text: str) -> str:
    return text.rstrip("\n")


KNOWN_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


def find_reasoning_tags(template: str) -> ReasoningTags | None:
    """The marks that a template speaks of; None where it speaks of none."""
    return next((marks for marks in KNOWN_TAGS if marks.opening in template or marks.closing in template), None)


def opens_reasoning(prompt: str, marks: ReasoningTags | None) -> bool:
    """Whether the reply to `prompt` begins inside the reasoning."""
    return marks is not None and prompt.rstrip().endswith(marks.opening)


def close_reasoning(marks: ReasoningTags) -> str:
    """What closes reasoning that the prompt has opened, for a reply that is to begin without any."""
    return f"\n{marks.closing}\n\n"
