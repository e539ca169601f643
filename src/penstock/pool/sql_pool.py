"""A pool over SQL tables: writes go through one writer, reads through threads that never hold it up."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from penstock.errors import PoolError
from penstock.pool import leases, reads, rules, writes
from penstock.pool.base import Change, GroupLimit, PoolClass, PoolDatabase, PoolStats
from penstock.pool.leases import ClaimRequest
from penstock.pool.rows import encode_row
from penstock.pool.rules import LeaseClock
from penstock.pool.writer import Writer
from penstock.records import End, Grade, Group, Lease, Mark, Node, Rollout, RolloutRef, Step, Task

T = TypeVar("T")


class ReaderThreads:
    """One thread per connection, so that a long report leaves one for the others. Each read sees one snapshot."""

    def __init__(self, databases: Sequence[PoolDatabase], explain: Callable[[Exception], Exception]) -> None:
        self._databases = databases
        self._explain = explain
        self._closed = False
        self._idle: SimpleQueue[PoolDatabase] = SimpleQueue()
        for database in databases:
            self._idle.put(database)
        self._threads = ThreadPoolExecutor(len(databases), thread_name_prefix="penstock-pool-reader")

    async def run(self, read: Callable[[PoolDatabase], T]) -> T:
        if self._closed:
            raise PoolError("the pool is closed; open it again")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, read)

    async def close(self) -> None:
        """Wait for running reads, then close the connections."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        for database in self._databases:
            database.close()

    def _read(self, read: Callable[[PoolDatabase], T]) -> T:
        database = self._idle.get()
        try:
            database.begin_reading()
            return read(database)
        except Exception as cause:
            error = self._explain(cause)
            if error is cause:
                raise
            raise error from cause
        finally:
            with suppress(*database.ERRORS):  # a connection that just broke has nothing to roll back
                if database.in_transaction:
                    database.execute("ROLLBACK")
            self._idle.put(database)


class Notifier:
    """Counts notifications and wakes all waiters with each one. Any thread may notify."""

    def __init__(self) -> None:
        self.count = 0
        """Notifications so far; pass it to `wait_after`."""
        self._lock = threading.Lock()
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        with self._lock:
            self.count += 1
            waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            with suppress(RuntimeError):  # its loop is closed, so nobody waits there any more
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def wait_after(self, count: int, timeout_s: float) -> None:
        """Wait for a notification after the first `count`, at most `timeout_s` seconds.

        A caller reads `count` before it looks for changes, so that one in between is not missed.
        """
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.count > count:
                return
            self._waiters.add(waiter)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def close(self) -> None: ...


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


POLL_S = 0.25
"""How often a waiter looks for changes of other processes, without a notifier."""
POLL_NOTIFIED_S = 5.0
"""The same with a notifier, in case its connection broke meanwhile."""


class SqlPool(PoolClass):
    """Implements `Pool` over tables that several processes may have open. `explain` turns database errors into PoolErrors."""

    def __init__(
        self,
        writing: PoolDatabase,
        reading: Sequence[PoolDatabase],
        clock: LeaseClock,
        explain: Callable[[Exception], Exception],
        notifier: Notifier | None = None,
    ) -> None:
        clock.expired(leases.open_leases(writing))  # starts the time of leases that other processes hold
        self._clock = clock
        self._notifier = notifier or Notifier()
        self._poll_s = POLL_S if notifier is None else POLL_NOTIFIED_S
        self._writer = Writer(writing, explain)
        self._reader = ReaderThreads(reading, explain)

    async def open_group(
        self, task: Task, rollouts: Sequence[RolloutRef], *, seq: int | None, min_size: int = 0, limit: GroupLimit | None = None
    ) -> None:
        group = writes.encode_group(task, rollouts)
        await self._change(lambda database: writes.open_group(database, group, seq, min_size, limit))

    async def replace(self, lost: RolloutRef, reason: str) -> RolloutRef:
        rows = {
            "row": encode_row(lost, f"rollout {lost.id!r}"),
            "successor_row": encode_row(lost.successor, f"rollout {lost.successor.id!r}"),
        }
        await self._change(lambda database: writes.replace(database, lost, reason, **rows))
        return lost.successor

    async def append(self, step: Step, node: Node | None) -> None:
        await self._writer.store(writes.APPEND, writes.encode_append(step, node))

    async def grade(self, grade: Grade) -> None:
        row = writes.encode_grade(grade)
        await self._change(lambda database: writes.grade(database, row))

    async def end(
        self, rollout_id: str, end: End, message: str = "", grades: Sequence[Grade] = (), *, only_grades: bool = False
    ) -> bool:
        request = writes.encode_end(rollout_id, end, message, grades, only_grades=only_grades)
        try:
            return await self._writer.store(writes.END, request)
        finally:
            self._notifier.notify()

    async def mark(self, mark: Mark) -> bool:
        rules.check_mark(mark)
        row = encode_row(mark, rules.mark_name(mark))
        return await self._change(lambda database: writes.mark(database, mark, row))

    async def drop(self, group_id: str, reason: str) -> bool:
        return await self._change(lambda database: writes.drop(database, group_id, reason))

    async def claim(self, count: int, *, channel: str = "train", version: int, max_staleness: int, lease_s: float) -> Lease | None:
        rules.check_claim(count, lease_s)
        request = ClaimRequest(uuid.uuid4().hex, count, channel, version, max_staleness, lease_s)
        try:
            claimed = await self._change(lambda database: leases.claim(database, self._clock, request))
            if claimed is None:
                return None
            groups = await self._reader.run(lambda database: reads.read_groups(database, claimed.group_ids))
        except BaseException:  # also on cancellation: the caller will never see this lease
            await asyncio.shield(self._return_lease(request.lease_id))
            raise
        return Lease(id=request.lease_id, groups=tuple(groups), stale=claimed.stale)

    async def renew(self, lease_id: str, lease_s: float) -> None:
        rules.check_lease_time(lease_s)
        if not await self._change(lambda database: leases.renew(database, self._clock, lease_id, lease_s)):
            raise rules.lease_is_over(lease_id)

    async def release(self, lease_id: str | None = None) -> None:
        await self._change(lambda database: leases.release(database, lease_id))

    async def ack(self, lease_id: str, policy_version: int) -> None:
        await self._change(lambda database: leases.ack(database, lease_id, policy_version))

    async def undo(self, policy_version: int) -> list[tuple[str, int]]:
        return await self._change(lambda database: leases.undo(database, policy_version))

    async def run_id(self) -> str:
        return await self._reader.run(leases.read_run_id)

    async def set_run_id(self, run_id: str) -> None:
        await self._change(lambda database: leases.set_run_id(database, run_id))

    async def rollout(self, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Rollout:
        return await self._reader.run(
            lambda database: reads.read_rollout(database, rollout_id, first_step=first_step, first_node=first_node)
        )

    async def task(self, rollout_id: str) -> Task:
        return await self._reader.run(lambda database: reads.read_task(database, rollout_id))

    async def groups(self, channel: str, *, first_seq: int = 0, limit: int = 100) -> list[Group]:
        return await self._reader.run(lambda database: reads.list_groups(database, channel, first_seq=first_seq, limit=limit))

    async def rollout_refs(self, group_id: str) -> list[RolloutRef]:
        return await self._reader.run(lambda database: reads.list_rollouts(database, group_id))

    async def channels(self) -> list[str]:
        return await self._reader.run(reads.list_channels)

    async def unfinished(self, channel: str) -> list[Group]:
        return await self._reader.run(lambda database: reads.list_unfinished(database, channel))

    async def trained(self) -> list[tuple[str, int]]:
        return await self._reader.run(reads.read_ledger)

    async def stats(self, channel: str | None = None) -> PoolStats:
        return await self._reader.run(lambda database: reads.read_stats(database, channel))

    async def changes(self, after: int = 0, *, limit: int = 1000) -> list[Change]:
        return await self._reader.run(lambda database: reads.read_changes(database, after, limit))

    async def position(self) -> int:
        return await self._reader.run(reads.read_position)

    async def wait(self, after: int, *, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self._notifier.count
            if await self.changes(after, limit=1):
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await self._notifier.wait_after(seen, min(left, self._poll_s))

    async def close(self) -> None:
        self._notifier.close()
        await self._reader.close()
        await self._writer.close()

    async def _change(self, write: Callable[[PoolDatabase], T]) -> T:
        """Run a write, then wake those who wait for a change."""
        try:
            return await self._writer.submit(write)
        finally:
            self._notifier.notify()

    async def _return_lease(self, lease_id: str) -> None:
        with suppress(PoolError):  # it was never made
            await self.release(lease_id)
