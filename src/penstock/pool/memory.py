"""The pool that ends with its process: a SQLite file in shared memory. For tests and dry runs."""

import os
import shutil
import tempfile
import time
import weakref
from functools import partial
from pathlib import Path
from typing import ClassVar

from penstock.pool.base import PoolDatabase
from penstock.pool.rules import Clock
from penstock.pool.sqlite import SqlitePool
from penstock.pool.writer import Writer
from penstock.records import RolloutRef

SHARED_MEMORY = Path("/dev/shm")


class MemoryPool(SqlitePool):
    """Implements `Pool`; `folder` is ignored. The file is deleted when the pool is closed or collected."""

    name: ClassVar[str] = "memory"
    durable: ClassVar[bool] = False
    shareable: ClassVar[bool] = False

    def __init__(self, folder: Path, *, url: str = "", clock: Clock = time.monotonic) -> None:
        self.check_url(url)
        own = tempfile.mkdtemp(prefix="penstock-pool-", dir=SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None)
        super().__init__(Path(own), clock=clock)
        self._delete = weakref.finalize(self, _delete, self._writer, own)

    @classmethod
    def why_unreadable(cls, folder: Path) -> str | None:
        return "this run kept its steps in memory (pool.name = 'memory'), so nothing is left of them to read"

    @classmethod
    def size_bytes(cls, folder: Path, url: str) -> int | None:
        return None

    async def close(self) -> None:
        await super().close()
        self._delete()

    async def forget(self, rollout: RolloutRef) -> None:
        """Remove a rollout, which is the only one of its group, and all counts and changes: for a server that keeps nothing."""
        await self._change(partial(_forget, rollout=rollout))


def _delete(writer: Writer, folder: str) -> None:
    writer.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _forget(database: PoolDatabase, rollout: RolloutRef) -> None:
    for table in ("nodes", "steps", "grades", "marks"):
        database.execute(f"DELETE FROM {table} WHERE rollout_id = ?", (rollout.id,))
    database.execute("DELETE FROM rollouts WHERE id = ?", (rollout.id,))
    database.execute("DELETE FROM groups WHERE id = ?", (rollout.group_id,))
    for table in ("tally", "changes"):
        database.execute(f"DELETE FROM {table}")
