"""Bodies that grow: an agent sends its whole conversation with every call, and only its end is new.

What a body repeats of the one before is compared with it, which costs next to nothing, and neither parsed nor hashed again. The
values and digests are those of the whole body all the same; where anything is in doubt, the whole body is read.
"""

import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from json import JSONDecoder
from secrets import token_hex
from typing import Any

import orjson

from penstock.chat.templates import Tool, chain_digest, message_digest, tools_digest
from penstock.codec import UNLOCKED, pieces
from penstock.records import Message

LONG = 1 << 14
"""Bytes from which a body is remembered; shorter ones are read as fast as they are compared."""
MOST_LOOSE = 3
"""How many entries may be loose: one more for each body that none went on from, so there is an end to trying."""

OPENING = re.compile(rb'"(messages|input)"\s*:\s*\[')
GAP = re.compile(r"[ \t\n\r,]*")
MARK = token_hex(16).encode()
"""Stands for the entries that are known. No caller can guess it, so where it turns up in a value, they would."""
_DECODER = JSONDecoder()


class GrowingBody:
    """The last body of one transcript: a JSON object with a list of messages in it, as a rule the beginning of the next one's."""

    def __init__(self) -> None:
        self._body = b""
        self._known = 0
        """How far the body is known: to the end of one of the list's entries."""
        self._entries: list[Any] = []
        """Those up to there."""
        self._head = b""
        """The body up to the first entry."""
        self._key = ""
        """Of the list."""
        self._grew = False
        """Whether it went on from the one before."""
        self._loose = 0
        """How many entries at the end are not counted on: agents move marks along with the end, or take reminders off it."""
        self._who = b""
        self._hash = sha256()
        """Of `_who` and the first `_hashed` bytes."""
        self._hashed = 0

    def digest(self, who: bytes, body: bytes) -> str:
        """The SHA-256 of `who` and `body`, since processors compute it themselves."""
        if not self._goes_on(body):
            digest = sha256(who)
            _feed(digest, memoryview(body))
            return digest.hexdigest()
        if who != self._who:
            self._who, self._hash, self._hashed = who, sha256(who), 0
        view = memoryview(body)
        _feed(self._hash, view[self._hashed : self._known])
        self._hashed = self._known
        digest = self._hash.copy()
        _feed(digest, view[self._known :])
        return digest.hexdigest()

    def read(self, body: bytes) -> Any:
        """What `orjson.loads` gives; entries that are known are the very same objects as last time, so nobody may change them."""
        if len(body) < LONG:
            return orjson.loads(body)
        grew = self._goes_on(body)
        if not grew and not self._begin(body):
            return orjson.loads(body)
        rest, mark = body[self._known :], b'"%b"' % MARK if self._entries else b'"%b",' % MARK
        try:
            value = orjson.loads(self._head + mark + rest)
            marked, *fresh = value[self._key]
        except (ValueError, TypeError, KeyError):
            return orjson.loads(body)
        if marked != MARK.decode():  # the key comes a second time, or is not the object's own
            return orjson.loads(body)
        value[self._key], self._grew = [*self._entries, *fresh], grew
        self._learn(body, rest, fresh)
        return value

    def _goes_on(self, body: bytes) -> bool:
        return bool(self._entries) and body.startswith(memoryview(self._body)[: self._known])

    def _begin(self, body: bytes) -> bool:
        """Begin anew with a body that does not go on from the last one; False where it holds no list, or this came too often."""
        self._loose += bool(self._entries) and not self._grew
        self._body, self._entries, self._who = b"", [], b""
        found = OPENING.search(body) if self._loose <= MOST_LOOSE else None
        if found is None:
            return False
        self._head, self._known, self._key = body[: found.end()], found.end(), found[1].decode()
        return True

    def _learn(self, body: bytes, rest: bytes, fresh: list[Any]) -> None:
        """Know the body up to the end of its fresh entries, but for the loose ones."""
        text, end = rest.decode("latin-1"), 0  # a character for each byte
        firm = fresh[: max(0, len(fresh) - self._loose)]
        try:
            for _ in firm:
                gap = GAP.match(text, end)
                end = _DECODER.raw_decode(text, gap.end() if gap else end)[1]
        except (ValueError, RecursionError):  # this decoder has bounds of its own
            return
        self._body, self._known = body, self._known + end
        self._entries += firm


def _feed(digest: Any, view: memoryview) -> None:
    for piece in pieces(view, UNLOCKED):
        digest.update(piece)


class LastRequest:
    """The last call of one transcript, as it came and as it was read."""

    def __init__(self) -> None:
        self.body = GrowingBody()
        self._raw: list[Any] = []
        self._messages: list[Message] = []
        self._raw_tools: Any = None
        self._tools: tuple[Tool, ...] = ()
        self._chains: list[str] = [tools_digest(())]
        """Digest of the tools, then of the path after each of `_messages`."""

    def messages(self, raw: list[Any], read: Callable[[int, Any], Message]) -> tuple[Message, ...]:
        """Every entry of `raw` read by itself; those that begin the list as they did last time are not read again."""
        known = _equal(self._raw, raw)
        fresh = [read(place, raw[place]) for place in range(known, len(raw))]
        self._raw[known:], self._messages[known:] = raw[known:], fresh
        del self._chains[known + 1 :]
        return tuple(self._messages)

    def tools(self, raw: Any, read: Callable[[Any], tuple[Tool, ...]]) -> tuple[Tool, ...]:
        """The tools; the same ones as last time are not read again."""
        if raw != self._raw_tools:
            self._tools, self._raw_tools = read(raw), raw
            self._chains = [tools_digest(self._tools)]
        return self._tools

    def chains(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> list[str]:
        """Digest of the tools, then of the path after each message."""
        if tools is not self._tools:
            self._tools, self._raw_tools, self._chains = tools, None, [tools_digest(tools)]
        known = _equal(self._messages, list(messages))
        if known < len(messages):
            self._messages, self._raw = list(messages), []
        del self._chains[known + 1 :]
        for message in messages[len(self._chains) - 1 :]:
            self._chains.append(chain_digest(self._chains[-1], message_digest(message)))
        return list(self._chains)


def _equal(before: list[Any], now: list[Any]) -> int:
    """How many entries the two lists begin with alike."""
    if now[: len(before)] == before:
        return len(before)
    pairs = enumerate(zip(before, now, strict=False))
    return next((place for place, (one, other) in pairs if one is not other and one != other), len(now))
