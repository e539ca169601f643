"""LoRA adapters on servers, each version under a name of its own: a request names the version that samples it.

So nothing is paused, interrupted or prefilled again for a new version, and a server's cache, which is keyed by the name, never
mixes two of them. A version is loaded before it is announced, and unloaded once it is not the newest and no request uses it.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from penstock.http.client import UpstreamError


class ServedAdapter(NamedTuple):
    policy: str
    version: int
    folder: Path
    """Absolute; servers open it under the same path, perhaps again when they have set the adapter aside for others."""
    name: str
    """On the servers; no other run or version has it."""


class ServedAdapters:
    """The adapters that servers hold or should hold."""

    def __init__(self) -> None:
        self._newest: dict[str, ServedAdapter] = {}
        self._older: list[ServedAdapter] = []
        self._requests: Counter[str] = Counter()
        """Running ones, by the adapter's name."""
        self._unloaded: list[ServedAdapter] = []
        """Their files may be deleted when the next version is announced."""

    def __bool__(self) -> bool:
        return bool(self._newest)

    def loaded(self) -> list[ServedAdapter]:
        return [*self._newest.values(), *self._older]

    def announce(self, adapter: ServedAdapter) -> list[ServedAdapter]:
        """Makes new requests of the policy use this one; returns what nobody uses any more, to be unloaded."""
        if before := self._newest.get(adapter.policy):
            self._older.append(before)
        self._newest[adapter.policy] = adapter
        self._unloaded = [old for old in self._older if not self._requests[old.name]]
        self._older = [old for old in self._older if self._requests[old.name]]
        return self._unloaded

    def version(self, policy: str) -> int:
        """Of the policy's newest adapter; 0 if it has none."""
        newest = self._newest.get(policy)
        return newest.version if newest else 0

    def folders(self) -> set[Path]:
        """Folders that servers may still read."""
        return {adapter.folder for adapter in (*self.loaded(), *self._unloaded)}

    @contextmanager
    def using(self, policy: str) -> Generator[ServedAdapter | None]:
        """The policy's newest adapter, kept loaded inside; None if it has none."""
        adapter = self._newest.get(policy)
        if adapter is None:
            yield None
            return
        self._requests[adapter.name] += 1
        try:
            yield adapter
        finally:
            self._requests[adapter.name] -= 1


def adapter_roots(listed: Any, url: str) -> dict[str, str]:
    """The adapters in an answer of `/v1/models`: their folders by name."""
    try:
        return {str(entry["id"]): str(entry.get("root") or "") for entry in listed["data"] if entry.get("parent")}
    except (KeyError, TypeError, AttributeError) as cause:
        raise UpstreamError(f"{url}/v1/models does not say what is served", kind="garbled") from cause
