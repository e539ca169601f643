"""One thread that owns the writing connection: whatever waits when it is free becomes one transaction."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import PoolError

T = TypeVar("T")
Explain = Callable[[Exception], Exception]


@dataclass(slots=True, eq=False)
class _Job:
    write: Callable[[sqlite3.Connection], Any]
    done: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        """Tell the one who waits, on its own loop."""
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


class Writer:
    """Group commit. `explain` turns what SQLite raises into what callers see.

    The first write is committed alone; those that come while it goes to disk share the next commit, so many concurrent callers
    cost few syncs and a single one waits for nobody. There is no timer. A write that was handed over is carried out even if its
    caller is cancelled meanwhile.
    """

    def __init__(self, database: sqlite3.Connection, explain: Explain, *, limit: int = 1024) -> None:
        self._database = database
        self._explain = explain
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: list[_Job] = []
        self._outside: list[asyncio.Future[None]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="penstock-pool-writer", daemon=True)
        self._thread.start()

    async def submit(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """Run `write` in a transaction and return its result once that is on disk. It may raise: then it has changed nothing."""
        job = _Job(write, asyncio.get_running_loop().create_future())
        while (room := self._offer(job)) is not None:
            await room
        return await job.done

    async def close(self) -> None:
        """Finish what waits, then close the connection."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _offer(self, job: _Job) -> asyncio.Future[None] | None:
        """Queue the job, or return what to wait for before the next try."""
        with self._changed:
            if self._closed:
                raise PoolError("the pool is closed; open it again")
            if len(self._queue) >= self._limit:
                self._outside.append(job.done.get_loop().create_future())
                return self._outside[-1]
            self._queue.append(job)
            self._changed.notify()
            return None

    def _run(self) -> None:
        while batch := self._take():
            self._commit(batch)
            _settle(batch)
        self._database.close()

    def _take(self) -> list[_Job]:
        """All that waits; empty once the pool is closed and everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            batch, self._queue = self._queue, []
            outside, self._outside = self._outside, []
        for room in outside:
            _call(room.get_loop(), lambda room=room: room.done() or room.set_result(None))
        return batch

    def _commit(self, batch: list[_Job]) -> None:
        try:
            self._database.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as cause:
            self._fail(batch, cause)
            return
        try:
            for job in batch:
                self._carry_out(job)
            self._database.execute("COMMIT")
        except Exception as cause:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            self._retry(batch, cause)

    def _carry_out(self, job: _Job) -> None:
        """One write, alone in a savepoint: if it fails, its neighbours do not."""
        self._database.execute("SAVEPOINT one")
        try:
            job.result, job.error = job.write(self._database), None
        except Exception as cause:
            if not self._database.in_transaction:  # SQLite gave up the whole transaction, the neighbours' writes included
                raise
            self._database.execute("ROLLBACK TO one")
            job.error = self._explain(cause)
        self._database.execute("RELEASE one")

    def _retry(self, batch: list[_Job], cause: Exception) -> None:
        """The transaction came to nothing: what can be written alone is."""
        if len(batch) == 1:
            self._fail(batch, cause)
            return
        for job in batch:
            self._commit([job])

    def _fail(self, batch: list[_Job], cause: Exception) -> None:
        for job in batch:
            job.error = self._explain(cause)


def _settle(batch: list[_Job]) -> None:
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
