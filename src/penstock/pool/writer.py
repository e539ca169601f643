"""One thread that owns the writing connection: whatever waits when it is free becomes one transaction."""

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.errors import PoolError
from penstock.pool.committer import TOGETHER, Committer, Explain
from penstock.pool.database import Database
from penstock.pool.jobs import Bulk, Waiting

T = TypeVar("T")


class Writer:
    """Group commit. `explain` turns what the database raises into what callers see.

    The first write is committed alone; those that come while it goes to disk share the next commit, so many concurrent callers
    cost few syncs and a single one waits for nobody. Where the last commit was shared, the next waits a moment for as many. Of a
    crowd a part is written while those before it are told and make their next. A write that was handed over is carried out even
    if its caller is cancelled meanwhile; the cancellation goes on once it is done.
    """

    def __init__(self, database: Database, explain: Explain, *, limit: int = 1024) -> None:
        self._committer = Committer(database, explain)
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: list[Waiting] = []
        self._outside: list[asyncio.Future[None]] = []
        self._together = 1
        """Writes in the last batch: where there were several, others are likely to come at once."""
        self._wanted = 1
        """Writes that the thread waits for: it is woken once for all of them, as each time it takes a turn at the interpreter."""
        self._closed = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread = threading.Thread(target=self._run, name="penstock-pool-writer", daemon=True)
        self._thread.start()

    async def submit(self, write: Callable[[Database], T]) -> T:
        """Run `write` in a transaction and return its result once that is on disk. It may raise: then it has changed nothing."""
        return await self._carried_out(Waiting(write=write))

    async def store(self, bulk: Bulk, value: Any) -> Any:
        """The same for a value of this kind, perhaps together with others."""
        return await self._carried_out(Waiting(bulk=bulk, value=value))

    async def close(self) -> None:
        """Finish what waits, then close the connection."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    async def _carried_out(self, job: Waiting) -> Any:
        while (room := self._offer(job)) is not None:
            await room
        return await job.outcome()

    def _offer(self, job: Waiting) -> asyncio.Future[None] | None:
        """Queue the job, or return what to wait for before the next try."""
        with self._changed:
            if self._closed:
                raise PoolError("the pool is closed; open it again")
            if len(self._queue) >= self._limit:
                self._outside.append(job.done.get_loop().create_future())
                return self._outside[-1]
            self._queue.append(job)
            if len(self._queue) >= self._wanted:
                self._changed.notify()
            return None

    def _run(self) -> None:
        while batch := self._take():
            self._committer.commit(batch)
            _settle(batch)
        self._committer.close()

    def _take(self) -> list[Waiting]:
        """All that waits; empty once the pool is closed and everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._together > 1:
                self._wanted = self._together
                self._changed.wait_for(lambda: len(self._queue) >= self._wanted or self._closed, GATHER_S)
                self._wanted = 1
            batch, self._queue = self._queue[:TOGETHER], self._queue[TOGETHER:]
            self._together = len(batch)
            outside, self._outside = self._outside, []
        for room in outside:
            _call(room.get_loop(), lambda room=room: room.done() or room.set_result(None))
        return batch


SWITCH_S = 0.0005
"""How long one thread of the process may keep the others waiting. The writing thread asks for its turn with every statement: at
Python's usual 5 ms a busy process would keep each commit waiting for many times as long as the disk does."""
GATHER_S = 0.003
"""That moment. Each commit takes a sync and several turns at the interpreter's lock, which those who share it pay once."""


def _settle(batch: Sequence[Waiting]) -> None:
    """Wake each event loop once, however many of its callers waited."""
    loops = {job.done.get_loop() for job in batch}
    for loop in loops:
        mine = [job for job in batch if job.done.get_loop() is loop]
        _call(loop, lambda mine=mine: [job.settle() for job in mine])


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():  # closed: nobody waits there any more
            raise
