"""The last request of a transcript, kept so that the next one is read incrementally.

An agent sends its whole conversation with every call, and only its end is new. The part that repeats the last body is compared,
which is cheap, and neither parsed nor hashed again. Values and digests are the same as for the whole body; in any doubt the whole
body is read.
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
from penstock.gateway.weights import json_weight
from penstock.records import Message

MIN_CACHED_BYTES, MAX_CACHED_BYTES = 1 << 14, 8 << 20
"""Size of bodies that are kept. Shorter ones are parsed as fast as compared; longer ones would fill the memory."""
MAX_UNSTABLE = 3
"""Bound of `IncrementalBody._unstable`; after it, bodies are parsed in full."""

LIST_START = re.compile(rb'"(messages|input)"\s*:\s*\[')
SEPARATOR = re.compile(r"[ \t\n\r,]*")
PLACEHOLDER = token_hex(16).encode()
"""Replaces the known entries in the JSON that is parsed. It is random, so a caller cannot send it."""
NO_TOOLS = tools_digest(())
_DECODER = JSONDecoder()


class IncrementalBody:
    """The last request body of one transcript: a JSON object with a list of messages, usually a prefix of the next one's."""

    def __init__(self) -> None:
        self._body = b""
        self._known = 0
        """Bytes of the body that are known: up to the end of one of the list's entries."""
        self._entries: list[Any] = []
        """The parsed entries up to there."""
        self._head = b""
        """The body up to the first entry."""
        self._key = ""
        """The key of the list."""
        self._grew = False
        """Whether the body extended the one before."""
        self._unstable = 0
        """How many entries at the end are not reused. One more after each body that was not extended: some agents move cache marks
        along with the end of the conversation, or remove reminders from it."""
        self._salt = b""
        self._hash = sha256()
        """The hash of `_who` and the first `_hashed` bytes."""
        self._hashed = 0

    @property
    def size(self) -> int:
        """Bytes that are kept of the body."""
        return len(self._body)

    def digest(self, salt: bytes, body: bytes) -> str:
        """SHA-256 of `salt` and `body`; processors have instructions for it."""
        if not self._extends_last(body):
            digest = sha256(salt)
            _update_hash(digest, memoryview(body))
            return digest.hexdigest()
        if salt != self._salt:
            self._salt, self._hash, self._hashed = salt, sha256(salt), 0
        view = memoryview(body)
        _update_hash(self._hash, view[self._hashed : self._known])
        self._hashed = self._known
        digest = self._hash.copy()
        _update_hash(digest, view[self._known :])
        return digest.hexdigest()

    def read(self, body: bytes) -> Any:
        """The same value as `orjson.loads`. Known entries are the same objects as last time: callers must not change them."""
        if not MIN_CACHED_BYTES <= len(body) <= MAX_CACHED_BYTES:
            return orjson.loads(body)
        grew = self._extends_last(body)
        if not grew and not self._begin(body):
            return orjson.loads(body)
        rest = body[self._known :]
        known = b'"%b"' % PLACEHOLDER if self._entries else b'"%b",' % PLACEHOLDER
        try:
            value = orjson.loads(self._head + known + rest)
            placeholder, *fresh = value[self._key]
        except (ValueError, TypeError, KeyError):
            return orjson.loads(body)
        if placeholder != PLACEHOLDER.decode():  # the key is repeated, or belongs to a nested object
            return orjson.loads(body)
        value[self._key], self._grew = [*self._entries, *fresh], grew
        self._remember(body, rest, fresh)
        return value

    def _extends_last(self, body: bytes) -> bool:
        return bool(self._entries) and body.startswith(memoryview(self._body)[: self._known])

    def _begin(self, body: bytes) -> bool:
        """Start again with a body that does not extend the last one; False if it has no list, or this happened too often."""
        self._unstable += bool(self._entries) and not self._grew
        self._body, self._entries, self._salt = b"", [], b""
        found = LIST_START.search(body) if self._unstable <= MAX_UNSTABLE else None
        if found is None:
            return False
        self._head, self._known, self._key = body[: found.end()], found.end(), found[1].decode()
        return True

    def _remember(self, body: bytes, rest: bytes, fresh: list[Any]) -> None:
        """Keep the body up to the end of its new entries, without the unstable ones at the end."""
        text, end = rest.decode("latin-1"), 0  # one character per byte
        stable = fresh[: max(0, len(fresh) - self._unstable)]
        try:
            for _ in stable:
                gap = SEPARATOR.match(text, end)
                end = _DECODER.raw_decode(text, gap.end() if gap else end)[1]
        except (ValueError, RecursionError):  # this decoder is stricter than orjson
            return
        self._body, self._known = body, self._known + end
        self._entries += stable


def _update_hash(digest: Any, view: memoryview) -> None:
    for piece in pieces(view, UNLOCKED):
        digest.update(piece)


class LastRequest:
    """The last request of one transcript, raw and parsed. What a first one has in common with `like` is not parsed again."""

    def __init__(self, like: "LastRequest | None" = None) -> None:
        self.body = IncrementalBody()
        self._raw: list[Any] = like._raw[:] if like else []
        self._messages: list[Message] = like._messages[:] if like else []
        self._raw_tools: Any = like._raw_tools if like else None
        self._tools: tuple[Tool, ...] = like._tools if like else ()
        self._chains: list[str] = like._chains[:] if like else [NO_TOOLS]
        """Digest of the tools, then of the path after each of `_messages`."""
        self._weights: list[int] = like._weights[:] if like else []
        """The weights of the first entries of `_raw`, each with its message; the others are weighed when `weight` is asked for."""
        self._tools_weight = like._tools_weight if like else 0

    @property
    def weight(self) -> int:
        """Bytes of memory that it takes, beside what it shares with the token graph."""
        unweighed = zip(self._raw[len(self._weights) :], self._messages[len(self._weights) :], strict=False)
        self._weights += [json_weight(raw) + json_weight(message) for raw, message in unweighed]
        return self.body.size + self._tools_weight + sum(self._weights)

    def messages(self, raw: list[Any], read: Callable[[int, Any], Message]) -> tuple[Message, ...]:
        """Every entry of `raw` parsed by `read`; entries that repeat the last request are not parsed again."""
        known = _common_prefix(self._raw, raw)
        fresh = [read(index, raw[index]) for index in range(known, len(raw))]
        self._raw[known:], self._messages[known:] = raw[known:], fresh
        del self._weights[known:]
        del self._chains[known + 1 :]
        return tuple(self._messages)

    def tools(self, raw: Any, read: Callable[[Any], tuple[Tool, ...]]) -> tuple[Tool, ...]:
        """The tools parsed by `read`, unless they repeat the last request."""
        if raw != self._raw_tools:
            self._tools, self._raw_tools = read(raw), raw
            self._tools_weight = 2 * json_weight(raw)
            self._chains = [tools_digest(self._tools)]
        return self._tools

    def chains(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> list[str]:
        """Digest of the tools, then of the path after each message."""
        if tools is not self._tools:
            self._tools, self._raw_tools, self._chains = tools, None, [tools_digest(tools)]
        known = _common_prefix(self._messages, list(messages))
        if known < len(messages):
            self._messages, self._raw, self._weights = list(messages), [], []
        del self._chains[known + 1 :]
        for message in messages[len(self._chains) - 1 :]:
            self._chains.append(chain_digest(self._chains[-1], message_digest(message)))
        return list(self._chains)


def _common_prefix(before: list[Any], now: list[Any]) -> int:
    """Length of the common prefix of the two lists."""
    if now[: len(before)] == before:
        return len(before)
    pairs = enumerate(zip(before, now, strict=False))
    return next((index for index, (one, other) in pairs if one is not other and one != other), len(now))
