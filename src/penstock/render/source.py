"""Sampled text as it comes, read by grammars that are written straight down: a read is a generator that yields for more text.

What a read decides depends on the text alone, never on how it was cut: where more text could change the answer, it waits.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Read = Generator[None, None, T]
"""A read under way; its value is what was read."""

SPACES = re.compile(r"\s*")


class Source:
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
