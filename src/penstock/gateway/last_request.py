"""What a transcript's last call said, so that the next one is read from where it differs: an agent sends its history every time."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.chat.templates import Tool, digest, link, tools_digest
from penstock.gateway.incremental_json import GrowingBody
from penstock.records import Message


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
            self._chains.append(link(self._chains[-1], digest(message)))
        return list(self._chains)


def _equal(before: list[Any], now: list[Any]) -> int:
    """How many entries the two lists begin with alike."""
    if now[: len(before)] == before:
        return len(before)
    pairs = enumerate(zip(before, now, strict=False))
    return next((place for place, (one, other) in pairs if one is not other and one != other), len(now))
