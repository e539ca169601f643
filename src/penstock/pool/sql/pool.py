"""Threads that read: each read sees one moment of the database, and never holds up the writer."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from penstock.errors import PoolError
from penstock.pool import rules
from penstock.pool.base import Bound, Change, PoolStats
from penstock.pool.leases import LeaseClock
from penstock.pool.notifier import Notifier
from penstock.pool.remote_writer import RemoteWriter
from penstock.pool.rows import seal
from penstock.pool.sql import leases, reads, writes
from penstock.pool.sql.database import Database
from penstock.pool.sql.leases import Wanted
from penstock.pool.writer import Writer
from penstock.records import Attempt, End, Grade, Group, Lease, Mark, Node, Rollout, Step, Task

T = TypeVar("T")


class ReaderThreads:
    """One thread per connection, so that a long report leaves one for the others."""

    def __init__(self, databases: Sequence[Database], explain: Callable[[Exception], Exception]) -> None:
        self._databases = databases
        self._explain = explain
        self._closed = False
        self._idle: SimpleQueue[Database] = SimpleQueue()
        for database in databases:
            self._idle.put(database)
        self._threads = ThreadPoolExecutor(len(databases), thread_name_prefix="penstock-pool-reader")

    async def run(self, read: Callable[[Database], T]) -> T:
        """What `read` returns; all its queries see the same state."""
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

    def _read(self, read: Callable[[Database], T]) -> T:
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
            with suppress(*database.ERRORS):  # where the connection broke just now, there is nothing left to end
                if database.in_transaction:
                    database.execute("ROLLBACK")
            self._idle.put(database)


ELSEWHERE_S = 0.25
"""How often one who waits looks for what other processes did, where nothing tells of it."""
MISSED_S = 5.0
"""The same where something does, in case its connection was broken meanwhile."""


class SqlPool:
    """The contract of `Pool` over tables that several processes may have open; `explain` makes PoolErrors of faults.

    Where `scribe` is the address of a process that writes for several, steps and ends are left to it.
    """

    def __init__(
        self,
        writing: Database,
        reading: Sequence[Database],
        clock: LeaseClock,
        explain: Callable[[Exception], Exception],
        bell: Notifier | None = None,
        scribe: str = "",
    ) -> None:
        clock.expired(leases.open_beats(writing))  # the time of leases left by others starts now
        self._clock = clock
        self._bell = bell or Notifier()
        self._poll_s = ELSEWHERE_S if bell is None else MISSED_S
        writer = Writer(writing, explain)
        self._writer = RemoteWriter(scribe, writer) if scribe else writer
        self._reader = ReaderThreads(reading, explain)

    async def open_group(
        self, task: Task, rollouts: Sequence[Rollout], *, seq: int | None, min_size: int = 0, bound: Bound | None = None
    ) -> None:
        group = writes.seal_group(task, rollouts)
        await self._change(lambda database: writes.open_group(database, group, seq, min_size, bound))

    async def replace(self, lost: Rollout, reason: str) -> Rollout:
        rows = {"row": seal(lost, f"rollout {lost.id!r}"), "successor_row": seal(lost.successor, f"rollout {lost.successor.id!r}")}
        await self._change(lambda database: writes.replace(database, lost, reason, **rows))
        return lost.successor

    async def append(self, step: Step, node: Node | None) -> None:
        await self._writer.store(writes.APPEND, writes.seal_append(step, node))

    async def grade(self, grade: Grade) -> None:
        given = writes.seal_grade(grade)
        await self._change(lambda database: writes.grade(database, given))

    async def end(self, rollout_id: str, end: End, message: str = "", grades: Sequence[Grade] = ()) -> bool:
        given = writes.seal_end(rollout_id, end, message, grades)
        try:
            return await self._writer.store(writes.END, given)
        finally:
            self._bell.ring()

    async def mark(self, mark: Mark) -> bool:
        rules.check_mark(mark)
        row = seal(mark, rules.mark_name(mark))
        return await self._change(lambda database: writes.mark(database, mark, row))

    async def drop(self, group_id: str, reason: str) -> bool:
        return await self._change(lambda database: writes.drop(database, group_id, reason))

    async def claim(self, count: int, *, channel: str = "train", version: int, max_staleness: int, lease_s: float) -> Lease | None:
        rules.check_claim(count, lease_s)
        wanted = Wanted(uuid.uuid4().hex, count, channel, version, max_staleness, lease_s)
        try:
            lent = await self._change(lambda database: leases.claim(database, self._clock, wanted))
            if lent is None:
                return None
            groups = await self._reader.run(lambda database: reads.read_groups(database, lent.group_ids))
        except BaseException:  # the caller will never see this lease
            await asyncio.shield(self._give_back(wanted.lease_id))
            raise
        return Lease(id=wanted.lease_id, groups=tuple(groups), stale=lent.stale)

    async def renew(self, lease_id: str, lease_s: float) -> None:
        rules.check_lease_time(lease_s)
        if not await self._change(lambda database: leases.renew(database, self._clock, lease_id, lease_s)):
            raise rules.lease_is_over(lease_id)

    async def release(self, lease_id: str | None = None) -> None:
        await self._change(lambda database: leases.release(database, lease_id))

    async def ack(self, lease_id: str, policy_version: int) -> None:
        await self._change(lambda database: leases.ack(database, lease_id, policy_version))

    async def attempt(self, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Attempt:
        return await self._reader.run(
            lambda database: reads.read_attempt(database, rollout_id, first_step=first_step, first_node=first_node)
        )

    async def task(self, rollout_id: str) -> Task:
        return await self._reader.run(lambda database: reads.read_task(database, rollout_id))

    async def groups(self, channel: str, *, first_seq: int = 0, limit: int = 100) -> list[Group]:
        return await self._reader.run(lambda database: reads.list_groups(database, channel, first_seq=first_seq, limit=limit))

    async def rollouts(self, group_id: str) -> list[Rollout]:
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
            heard = self._bell.heard
            if await self.changes(after, limit=1):
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await self._bell.ring_after(heard, min(left, self._poll_s))

    async def close(self) -> None:
        self._bell.close()
        await self._reader.close()
        await self._writer.close()

    async def _change(self, write: Callable[[Database], T]) -> T:
        """A write that others may wait for."""
        try:
            return await self._writer.submit(write)
        finally:
            self._bell.ring()

    async def _give_back(self, lease_id: str) -> None:
        with suppress(PoolError):  # it was never given
            await self.release(lease_id)
