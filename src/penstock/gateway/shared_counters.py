"""What the workers of one gateway share: counters that say who has written to a rollout, and each worker's metrics.

The counters are a memory-mapped file: a row for each rollout, a counter in it for each worker. A worker increments only its own,
after its write is stored and before anyone learns of it. If the others' counters are unchanged, a worker has missed nothing and
need not read the pool.
"""

import asyncio
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import orjson

from penstock.gateway.observability import FAMILIES, Samples, merge
from penstock.system.files import write_file

ROWS = 1 << 16
"""Rollouts whose hashes collide share a row; they only cause a few reads of the pool that were not needed."""
_COUNTER_BYTES = 8
SAVE_S = 1.0
"""How old another worker's metrics may be."""


class SharedCounters:
    """The counters as worker `number` of `count` sees them. A restarted worker continues its predecessor's counters."""

    def __init__(self, file: Path, number: int, count: int) -> None:
        self._number = number
        self._count = count
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, ROWS * count * _COUNTER_BYTES)
            self._memory = mmap.mmap(descriptor, ROWS * count * _COUNTER_BYTES)
        finally:
            os.close(descriptor)
        self._counters = memoryview(self._memory).cast("Q")

    def increment(self, rollout_id: str) -> None:
        """This worker has stored something of the rollout."""
        self._counters[self._row(rollout_id) + self._number] += 1

    def read(self, rollout_id: str) -> tuple[int, ...]:
        """All workers' counters, this worker's own as 0."""
        row = self._row(rollout_id)
        counters = self._counters[row : row + self._count].tolist()
        counters[self._number] = 0
        return tuple(counters)

    def _row(self, rollout_id: str) -> int:
        return zlib.crc32(rollout_id.encode("utf-8", "surrogatepass")) % ROWS * self._count


class Peers:
    """The other workers of the gateway, for worker `number` of `count`.

    Each worker saves its metrics to a file in `folder`, where the others and its successor read them: when a worker dies, the
    gateway's totals lose at most its last second. Without a folder there are no counters, and workers read the pool every time.
    """

    def __init__(self, number: int = 0, count: int = 1, folder: Path | None = None) -> None:
        self.number = number
        self.count = count
        self._folder = folder
        self._counters = SharedCounters(folder / "counters", number, count) if folder and count > 1 else None
        self._before = _without_gauges(self._read(number)) if folder else {}
        """What this worker's predecessors have counted."""

    def notify(self, rollout_id: str) -> None:
        """Tell the others that something of the rollout is stored."""
        if self._counters is not None:
            self._counters.increment(rollout_id)

    def read_counters(self, rollout_id: str) -> tuple[int, ...] | None:
        """A value that changes when another worker writes to the rollout; None if only the pool can say."""
        return None if self._counters is None else self._counters.read(rollout_id)

    async def merged(self, own: Samples) -> Samples:
        """The metrics of all workers; `own` are this worker's current ones."""
        if self._folder is None:
            return own
        others = [number for number in range(self.count) if number != self.number]
        return merge([self._before, own, *await asyncio.to_thread(lambda: [self._read(number) for number in others])])

    async def save_periodically(self, own: Callable[[], Samples]) -> None:
        """Save this worker's metrics every `SAVE_S`, until cancelled."""
        while True:
            await asyncio.to_thread(self.save, own())
            await asyncio.sleep(SAVE_S)

    def save(self, own: Samples) -> None:
        """Write this worker's metrics, atomically: the others may read at any time."""
        if self._folder is None:
            return
        # Not synced: it is written each second, and counters need not survive a power cut.
        write_file(self._file(self.number), orjson.dumps(merge([self._before, own])), durable=False)

    def _read(self, number: int) -> Samples:
        try:
            return orjson.loads(self._file(number).read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return {}

    def _file(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"counts-{number}.json"


def _without_gauges(samples: Samples) -> Samples:
    """Gauges describe a living process only."""
    return {name: lines for name, lines in samples.items() if name in FAMILIES and FAMILIES[name].kind != "gauge"}
