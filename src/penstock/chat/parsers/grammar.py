"""Sampled text as it comes, read by grammars that are written straight down: a read is a generator that yields for more text.

What a read decides depends on the text alone, never on how it was cut: where more text could change the answer, it waits.
"""

import re
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

import orjson

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


class Draft(Protocol):
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


def read_call(source: TextSource, draft: Draft, *, strict: bool = False) -> Read[bool]:
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


def _read_member(source: TextSource, draft: Draft, role: str, *, strict: bool) -> Read[bool]:
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
