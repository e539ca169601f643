"""Reads JSON as it is written: enough of the grammar to know where a value ends, so that arguments can be given out on the way."""

import re
from collections.abc import Callable
from typing import Protocol

import orjson

from penstock.render.source import Read, Source

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


def read_value(source: Source, give: Callable[[str], None]) -> Read[bool]:
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


def read_object(source: Source, give: Callable[[str], None]) -> Read[bool]:
    """Read one object; False where something else comes."""
    return (yield from source.peek()) == "{" and (yield from read_value(source, give))


def read_string(source: Source) -> Read[str]:
    """Read one string; empty where there is none."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from read_value(source, parts.append)):
        return ""
    try:
        return orjson.loads("".join(parts))
    except ValueError:
        return ""


def read_call(source: Source, draft: Draft, *, strict: bool = False) -> Read[bool]:
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


def _read_member(source: Source, draft: Draft, role: str, *, strict: bool) -> Read[bool]:
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
