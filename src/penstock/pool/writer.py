"""Group commit: a thread that writes what waits in batches, one transaction each."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from penstock.errors import PoolError
from penstock.pool.base import PoolDatabase
from penstock.system.processes import switch_threads_often

Write = Callable[[PoolDatabase], Any]
"""Runs in a transaction. If it raises, its changes are rolled back."""


class BatchOperation(NamedTuple):
    """A kind of write of which several can be done together with few statements."""

    name: str
    write_one: Callable[[PoolDatabase, Any], Any]
    write_many: Callable[[PoolDatabase, list[Any]], bool]
    """Returns False if the values must be written one by one; what it did is then rolled back."""
    result: Any = None
    """The result of each value that `write_many` wrote."""
    last: bool = False
    """Whether it is sorted behind other operations of its batch, so that alike ones are neighbours. All of them were waiting at the
    same time, so their order is free."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingWrite:
    """A write and its outcome. It is either `write`, or `value` for `operation`."""

    write: Write | None = None
    operation: BatchOperation | None = None
    value: Any = None
    result: Any = None
    error: Exception | None = None

    def run(self, database: PoolDatabase) -> Any:
        if self.operation is not None:
            return self.operation.write_one(database, self.value)
        assert self.write is not None, "a write has either an operation or a function"
        return self.write(database)


@dataclass(slots=True, eq=False, kw_only=True)
class AwaitedWrite(PendingWrite):
    """A write that a coroutine waits for."""

    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    settled: bool = False

    async def outcome(self) -> Any:
        """Wait for the result. A cancelled caller still waits until the write is done, then the cancellation propagates."""
        try:
            return await self.done
        except asyncio.CancelledError:
            if not self.settled:
                self.done = asyncio.get_running_loop().create_future()  # the cancellation has ended the first one
                await asyncio.wait({self.done})
                self.done.exception()  # retrieved, so that asyncio does not log it
            raise

    def settle(self) -> None:
        """Wake the caller; runs in its event loop."""
        self.settled = True
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


Explain = Callable[[Exception], Exception]

MAX_BATCH = 64
"""Writes of one commit. The SQL of a batch depends on its size, and SQLite caches a limited number of statements. The pages of a
much larger batch would not fit into its page cache and would be written twice."""


class BatchWriter:
    """Writes batches over one connection, in one thread. `explain` turns database errors into those that callers see."""

    def __init__(self, database: PoolDatabase, explain: Explain) -> None:
        self._database = database
        self._explain = explain

    def commit(self, batch: Sequence[PendingWrite]) -> bool:
        """Write the batch and set the result or error of each write. Returns False if no transaction could begin."""
        try:
            self._database.begin()
        except self._database.ERRORS as cause:
            self._fail(batch, cause)
            return False
        try:
            for writes in _runs(batch):
                if not self._write_together(writes, whole_batch=len(writes) == len(batch)):
                    for pending in writes:
                        self._write_alone(pending)
            self._database.execute("COMMIT")
        except Exception as cause:
            with suppress(*self._database.ERRORS):  # a connection that just broke has nothing to roll back
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
            self._retry(batch, cause)
        return True

    def close(self) -> None:
        self._database.close()

    def _write_together(self, writes: list[PendingWrite], *, whole_batch: bool) -> bool:
        """Write several values of one operation. Returns False, and changes nothing, if they must be written one by one.

        The `whole_batch` needs no savepoint: it can roll back its transaction.
        """
        operation = writes[0].operation
        if operation is None:
            return False
        if not whole_batch:
            self._database.execute("SAVEPOINT many")
        try:
            done = operation.write_many(self._database, [pending.value for pending in writes])
        except self._database.ERRORS:
            if not self._database.in_transaction:
                raise
            done = False
        if whole_batch and not done:
            self._database.execute("ROLLBACK")
            self._database.begin()
        if not whole_batch and not done:
            self._database.execute("ROLLBACK TO many")
        if not whole_batch:
            self._database.execute("RELEASE many")
        for pending in writes if done else ():
            pending.result = operation.result
        return done

    def _write_alone(self, pending: PendingWrite) -> None:
        """Run one write in a savepoint: if it fails, its neighbours do not."""
        self._database.execute("SAVEPOINT one")
        try:
            pending.result, pending.error = pending.run(self._database), None
        except Exception as cause:
            if not self._database.in_transaction:  # SQLite rolled back the whole transaction, with the neighbours' writes
                raise
            self._database.execute("ROLLBACK TO one")
            pending.error = self._explain(cause)
        self._database.execute("RELEASE one")

    def _retry(self, batch: Sequence[PendingWrite], cause: Exception) -> None:
        """Write each in its own transaction, after their common one failed."""
        if len(batch) == 1:
            self._fail(batch, cause)
            return
        for index, pending in enumerate(batch):
            pending.error = None
            if not self.commit([pending]):  # the others would fail too, each after the same wait for the lock
                self._fail(batch[index + 1 :], cause)
                return

    def _fail(self, batch: Sequence[PendingWrite], cause: Exception) -> None:
        for pending in batch:
            pending.error = self._explain(cause)


def _runs(batch: Sequence[PendingWrite]) -> Iterator[list[PendingWrite]]:
    """Cut the batch into runs that can be written together. A plain write stays behind those that came before it."""
    for plain, writes in groupby(batch, key=lambda pending: pending.operation is None):
        if plain:
            yield from ([pending] for pending in writes)
        else:
            ordered = sorted(writes, key=lambda pending: bool(pending.operation and pending.operation.last))
            yield from (
                list(alike) for _, alike in groupby(ordered, key=lambda pending: pending.operation and pending.operation.name)
            )


T = TypeVar("T")


class Writer:
    """Hands writes to a thread that commits them in batches. `explain` turns database errors into those that callers see.

    The first write is committed alone; those that arrive while it goes to disk share the next commit. So many concurrent callers
    cost few syncs, and a single one never waits. After a shared commit the next one waits a moment for more values, until the
    event loop falls quiet; not for other writes, which do not come in numbers. A write that was queued is done even if its caller
    is cancelled; the cancellation then propagates.
    """

    def __init__(self, database: PoolDatabase, explain: Explain, *, limit: int = 1024) -> None:
        self._batches = BatchWriter(database, explain)
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: list[AwaitedWrite] = []
        self._blocked: list[asyncio.Future[None]] = []
        """Callers that wait for room in the queue."""
        self._last_batch = 1
        """Size of the last batch. After a shared one, several more are likely to come at once."""
        self._wake_at = 1
        """Queue length that wakes the thread: once for all of them, as each time it waits for the interpreter's lock."""
        self._queued = 0
        """Writes that were ever queued."""
        self._watched: asyncio.AbstractEventLoop | None = None
        """The event loop that counts its turns without a new write, if one does."""
        self._quiet = False
        """Whether it has counted enough of them."""
        self._closed = False
        switch_threads_often()  # the writing thread waits for the interpreter's lock with every statement
        self._thread = threading.Thread(target=self._run, name="penstock-pool-writer", daemon=True)
        self._thread.start()

    async def submit(self, write: Callable[[PoolDatabase], T]) -> T:
        """Run `write` in a transaction and return its result once that is on disk. If it raises, nothing is changed."""
        return await self._enqueue(AwaitedWrite(write=write))

    async def store(self, operation: BatchOperation, value: Any) -> Any:
        """Do the same for a value, perhaps together with others of the same operation."""
        return await self._enqueue(AwaitedWrite(operation=operation, value=value))

    async def close(self) -> None:
        """Finish all queued writes, then close the connection."""
        self.stop()
        await asyncio.to_thread(self._thread.join)

    def stop(self) -> None:
        """Let the thread finish what is queued and end, without waiting for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    async def _enqueue(self, pending: AwaitedWrite) -> Any:
        while (room := self._try_enqueue(pending)) is not None:
            await room
        return await pending.outcome()

    def _try_enqueue(self, pending: AwaitedWrite) -> asyncio.Future[None] | None:
        """Queue the write, or return a future to wait for before the next try."""
        with self._changed:
            if self._closed:
                raise PoolError("the pool is closed; open it again")
            if len(self._queue) >= self._limit:
                self._blocked.append(pending.done.get_loop().create_future())
                return self._blocked[-1]
            self._queue.append(pending)
            self._queued, self._quiet = self._queued + 1, False
            loop = pending.done.get_loop()
            if self._watched is not loop:
                self._watched = loop
                loop.call_soon(self._watch, loop, self._queued, 0)
            if len(self._queue) >= self._wake_at:
                self._changed.notify()
            return None

    def _watch(self, loop: asyncio.AbstractEventLoop, seen: int, turns: int) -> None:
        """End the wait for more writes once `loop` has had some turns without one; runs in it, once a turn."""
        turns = turns + 1 if seen == self._queued else 0
        if turns < QUIET_TURNS:
            loop.call_soon(self._watch, loop, self._queued, turns)
            return
        with self._changed:
            self._quiet = True
            if self._watched is loop:
                self._watched = None
            if self._wake_at > 1:
                self._changed.notify()

    def _run(self) -> None:
        while batch := self._take():
            self._batches.commit(batch)
            _settle(batch)
        self._batches.close()

    def _take(self) -> list[AwaitedWrite]:
        """Wait for the next batch; empty once the writer is closed and everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._last_batch > 1 and any(pending.operation for pending in self._queue):
                self._wake_at = MAX_BATCH
                self._changed.wait_for(lambda: len(self._queue) >= MAX_BATCH or self._quiet or self._closed, GATHER_S)
                self._wake_at = 1
            batch, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
            self._last_batch = len(batch)
            blocked, self._blocked = self._blocked, []
        for room in blocked:
            _call(room.get_loop(), lambda room=room: room.done() or room.set_result(None))
        return batch


GATHER_S = 0.01
"""How long a batch waits at most for more writes while the event loop is busy: they then share one sync and several waits for the
interpreter's lock. A caller that waits could not continue anyway, as the loop has others to serve."""
QUIET_TURNS = 2
"""Turns of an event loop without a write after which no more are likely to come at once: from a request to its write are two."""


def _settle(batch: Sequence[AwaitedWrite]) -> None:
    """Wake each event loop once, however many of its callers waited."""
    for loop in {pending.done.get_loop() for pending in batch}:
        mine = [pending for pending in batch if pending.done.get_loop() is loop]
        _call(loop, lambda mine=mine: [pending.settle() for pending in mine])


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():  # a closed loop has nobody left to wake
            raise
