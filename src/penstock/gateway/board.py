"""A board that the workers of one gateway share: whether another of them has written to a rollout, without asking the pool.

The board is a file in memory. Each rollout has a row, each worker a number in it, which it alone counts up once what it wrote is
stored, and before anyone is told. A worker that finds the others' numbers as it last saw them has missed nothing.
"""

import mmap
import os
import zlib
from pathlib import Path

ROWS = 1 << 16
"""Rollouts that share one by chance are only looked at more often than they need to be."""
_SIZE = 8


class Board:
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
