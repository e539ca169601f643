"""A board that the workers of one gateway share: whether another of them has written to a rollout, without asking the pool.

The board is a file in memory. Each rollout has a row, each worker a number in it, which it alone counts up once what it wrote is
stored, and before anyone is told. A worker that finds the others' numbers as it last saw them has missed nothing.
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
"""Rollouts that share one by chance are only looked at more often than they need to be."""
_SIZE = 8


class SharedCounters:
    """As worker `number` of `of` sees it. A worker's successor counts on from where it stopped."""

    def __init__(self, file: Path, number: int, of: int) -> None:
        self._mine = number
        self._of = of
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(opened, ROWS * of * _SIZE)
            self._memory = mmap.mmap(opened, ROWS * of * _SIZE)
        finally:
            os.close(opened)
        self._numbers = memoryview(self._memory).cast("Q")

    def tell(self, rollout_id: str) -> None:
        """Something of the rollout is stored."""
        self._numbers[self._row(rollout_id) + self._mine] += 1

    def look(self, rollout_id: str) -> tuple[int, ...]:
        """What the others have told; another value than before where one of them told more since."""
        row = self._row(rollout_id)
        told = self._numbers[row : row + self._of].tolist()
        told[self._mine] = 0
        return tuple(told)

    def _row(self, rollout_id: str) -> int:
        return zlib.crc32(rollout_id.encode("utf-8", "surrogatepass")) % ROWS * self._of


SAVE_S = 1.0
"""How old another worker's counts may be."""


class Peers:
    """Worker `number` of `of`; alone by default. Each keeps its counts in a file of `folder`, where the others and its successor
    read them: what a gateway has counted does not go back when a worker dies, but for its last second. Without a folder they know
    each other by the pool alone."""

    def __init__(self, number: int = 0, of: int = 1, folder: Path | None = None) -> None:
        self.number = number
        self.of = of
        self._folder = folder
        self._board = SharedCounters(folder / "board", number, of) if folder and of > 1 else None
        self._before = _counters(self._read(number)) if folder else {}

    def tell(self, rollout_id: str) -> None:
        """Let the others know that something of a rollout is stored."""
        if self._board is not None:
            self._board.tell(rollout_id)

    def look(self, rollout_id: str) -> tuple[int, ...] | None:
        """What changes when another of them writes to the rollout; None where only the pool can tell."""
        return None if self._board is None else self._board.look(rollout_id)

    async def together(self, mine: Samples) -> Samples:
        """The counts of all workers, mine as they are now."""
        if self._folder is None:
            return mine
        others = [number for number in range(self.of) if number != self.number]
        return merge([self._before, mine, *await asyncio.to_thread(lambda: [self._read(number) for number in others])])

    async def keep(self, mine: Callable[[], Samples]) -> None:
        """Save my counts now and then; cancelled with the worker, which then saves them once more."""
        while True:
            await asyncio.to_thread(self.save, mine())
            await asyncio.sleep(SAVE_S)

    def save(self, mine: Samples) -> None:
        """Write my counts to where the others find them, as a whole."""
        if self._folder is None:
            return
        # Not synced: it is written each second, and counters need not survive a power cut.
        write_file(self._file(self.number), orjson.dumps(merge([self._before, mine])), durable=False)

    def _read(self, number: int) -> Samples:
        try:
            return orjson.loads(self._file(number).read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return {}

    def _file(self, number: int) -> Path:
        assert self._folder is not None, "one that is alone has no files"
        return self._folder / f"counts-{number}.json"


def _counters(samples: Samples) -> Samples:
    """Without what is only true of a process that lives."""
    return {name: lines for name, lines in samples.items() if name in FAMILIES and FAMILIES[name].kind != "gauge"}
