"""Writes that wait for their turn, and the kinds of them that can be carried out together."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from penstock.errors import PoolError
from penstock.pool.sql.database import Database

Write = Callable[[Database], Any]
"""Runs in a transaction. It may raise: then it has changed nothing."""


class Bulk(NamedTuple):
    """A kind of writes, of which several take few statements."""

    name: str
    one: Callable[[Database, Any], Any]
    """Writes one value."""
    together: Callable[[Database, list[Any]], bool]
    """Writes several; False where they must be written one by one, and then what it did is undone."""
    result: Any = None
    """Of each that is written so."""
    last: bool = False
    """Whether it comes after others that wait with it: no caller can tell their order, and alike ones shall be neighbours."""


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A write, or a value of a kind of them, and what came of it."""

    write: Write | None = None
    bulk: Bulk | None = None
    value: Any = None
    result: Any = None
    error: Exception | None = None

    def carry_out(self, database: Database) -> Any:
        if self.bulk is not None:
            return self.bulk.one(database, self.value)
        assert self.write is not None, "it is one of the two"
        return self.write(database)


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting(Job):
    """One that a coroutine waits for."""

    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    settled: bool = False

    async def outcome(self) -> Any:
        """Its result. It is carried out even if the one who waits is cancelled; the cancellation goes on once it is done."""
        try:
            return await self.done
        except asyncio.CancelledError:
            if not self.settled:
                self.done = asyncio.get_running_loop().create_future()
                await asyncio.wait({self.done})
                self.done.exception()  # it is the cancellation that goes on
            raise

    def settle(self) -> None:
        """Tell the one who waits, on its own loop."""
        self.settled = True
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


Explain = Callable[[Exception], Exception]

TOGETHER = 64
"""How many writes one commit and one statement may carry. Their SQL differs by number, and SQLite remembers a limited number of
statements; and the pages of many more would not fit into its cache, from where they go to the file twice."""


class Committer:
    """Carries out batches on a connection, in one thread. `explain` turns what the database raises into what callers see."""

    def __init__(self, database: Database, explain: Explain) -> None:
        self._database = database
        self._explain = explain

    def commit(self, batch: Sequence[Job]) -> bool:
        """Write the batch, each job with its result or error; False where no transaction could be begun."""
        try:
            self._database.begin()
        except self._database.ERRORS as cause:
            self._fail(batch, cause)
            return False
        try:
            for alike in _runs(batch):
                if not self._carry_out_together(alike, alone=len(alike) == len(batch)):
                    for job in alike:
                        self._carry_out(job)
            self._database.execute("COMMIT")
        except Exception as cause:
            with suppress(*self._database.ERRORS):  # where the connection broke just now, there is nothing left to undo
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
            self._retry(batch, cause)
        return True

    def close(self) -> None:
        """Let go of the connection."""
        self._database.close()

    def _carry_out_together(self, jobs: list[Job], *, alone: bool) -> bool:
        """Writes of one kind; False, and nothing changed, where one of them needs care. `alone` they are the whole transaction."""
        bulk = jobs[0].bulk
        if bulk is None:
            return False
        if not alone:
            self._database.execute("SAVEPOINT many")
        try:
            done = bulk.together(self._database, [job.value for job in jobs])
        except self._database.ERRORS:
            if not self._database.in_transaction:
                raise
            done = False
        if alone and not done:
            self._database.execute("ROLLBACK")
            self._database.begin()
        if not alone and not done:
            self._database.execute("ROLLBACK TO many")
        if not alone:
            self._database.execute("RELEASE many")
        for job in jobs if done else ():
            job.result = bulk.result
        return done

    def _carry_out(self, job: Job) -> None:
        """One write, alone in a savepoint: if it fails, its neighbours do not."""
        self._database.execute("SAVEPOINT one")
        try:
            job.result, job.error = job.carry_out(self._database), None
        except Exception as cause:
            if not self._database.in_transaction:  # SQLite gave up the whole transaction, the neighbours' writes included
                raise
            self._database.execute("ROLLBACK TO one")
            job.error = self._explain(cause)
        self._database.execute("RELEASE one")

    def _retry(self, batch: Sequence[Job], cause: Exception) -> None:
        """The transaction came to nothing: what can be written alone is."""
        if len(batch) == 1:
            self._fail(batch, cause)
            return
        for place, job in enumerate(batch):
            job.error = None
            if not self.commit([job]):  # nor will the others be able to, and each would wait as long
                self._fail(batch[place + 1 :], cause)
                return

    def _fail(self, batch: Sequence[Job], cause: Exception) -> None:
        for job in batch:
            job.error = self._explain(cause)


def _runs(batch: Sequence[Job]) -> Iterator[list[Job]]:
    """The batch cut into runs that can be written together; a write that cannot be stays after those that came before it."""
    for plain, jobs in groupby(batch, key=lambda job: job.bulk is None):
        if plain:
            yield from ([job] for job in jobs)
        else:
            ordered = sorted(jobs, key=lambda job: bool(job.bulk and job.bulk.last))
            yield from (list(alike) for _, alike in groupby(ordered, key=lambda job: job.bulk and job.bulk.name))


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
