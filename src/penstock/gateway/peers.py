"""What the workers of one gateway know of each other: their numbers, what they have written to, and each other's counts."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import orjson

from penstock.gateway.board import Board
from penstock.gateway.metrics import FAMILIES, Samples, merge

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
        self._board = Board(folder / "board", number, of) if folder and of > 1 else None
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
        file = self._file(self.number)
        draft = file.with_suffix(".new")
        draft.write_bytes(orjson.dumps(merge([self._before, mine])))
        draft.replace(file)

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
