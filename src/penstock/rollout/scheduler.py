"""Opens groups of rollouts in order and runs them: admission by staleness, deadlines, top-ups, and replacement of lost attempts.

Scheduler      opens groups while the staleness bound admits them, and runs their rollouts
GroupPolicy    tops up, drops or expires a group
run_once       one attempt at each task, for a held-out evaluation
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from penstock.config import RolloutSection
from penstock.errors import PoolFull, WorkerLost
from penstock.events import Events
from penstock.pool.base import GroupLimit, Pool
from penstock.records import End, Group, RolloutRef, Sampling, Task, make_rollout
from penstock.rollout.runner import Runner
from penstock.system.async_tools import finish_shielded, leaf_errors

TOPPED_UP = "too few of its group completed"
TOO_FEW = "too few rollouts completed"
LOST = "the process that ran it ended first"
REOPENED = "the run stopped first"

_RECHECK_S = 5.0
"""How often a waiting scheduler asks the pool whether groups were dropped, which must then be made up for."""


class RunnerPort(Protocol):
    """Runs rollouts: a Runner, or a stand-in for the runners of several processes."""

    async def run(self, rollout: RolloutRef, task: Task, sampling: Sampling) -> End | None: ...


def task_at(tasks: Sequence[Task], seq: int, *, seed: int, shuffle: bool = True) -> Task:
    """Returns the task of group `seq`. Every epoch takes each task once, in an order that depends on `seed` and epoch alone."""
    epoch, index = divmod(seq, len(tasks))
    return tasks[_order(len(tasks), seed, epoch)[index] if shuffle else index]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    # A permutation by hash, not `random.shuffle`: the same in every process and in every version of Python.
    return tuple(sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}/{epoch}/{index}".encode()).digest()))


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A group that runs. A place is one of its rollout slots: the attempts at a place replace each other."""

    id: str
    task: Task
    ends: dict[int, End | None]
    """By place, of its latest attempt; None while that runs."""
    rollouts: dict[int, RolloutRef]
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])
    """The asyncio tasks of the attempts that run, by rollout id."""
    topped_up: int = 0
    expired: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        return all(end is not None for end in self.ends.values())

    def failed_below(self, min_size: int) -> list[RolloutRef]:
        """Returns the failed attempts if fewer than `min_size` completed, else none."""
        failed = [self.rollouts[place] for place, end in self.ends.items() if end is not End.COMPLETED]
        return failed if len(self.ends) - len(failed) < min_size else []


def new_group(task: Task, rollouts: list[RolloutRef]) -> LiveGroup:
    places = {rollout.place: rollout for rollout in rollouts}
    return LiveGroup(rollouts[0].group_id, task, dict.fromkeys(places), places)


def resumed_group(group: Group) -> LiveGroup:
    """Makes the state of a group that an earlier process left unfinished."""
    places = {attempt.ref.place: attempt.ref for attempt in group.rollouts}
    ends = {attempt.ref.place: attempt.end for attempt in group.rollouts}
    return LiveGroup(group.id, group.task, ends, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """Applies the group settings of `[rollout]`: minimum size, top-ups, deadline."""

    pool: Pool
    events: Events
    limits: RolloutSection

    async def top_up(self, group: LiveGroup) -> list[RolloutRef]:
        """Opens new attempts for a group of which too few completed. Returns none if it is complete or was dropped."""
        failed = group.failed_below(self.limits.min_size)
        if not failed:
            return []
        if group.expired or group.topped_up >= self.limits.top_up:
            await self.pool.drop(group.id, TOO_FEW)
            self.events.emit("group.drop", group_id=group.id, reason=TOO_FEW, failed=len(failed))
            return []
        group.topped_up += 1
        fresh = [await self.pool.replace(rollout, TOPPED_UP) for rollout in failed]
        self.events.emit("group.top_up", group_id=group.id, rollouts=len(fresh), attempt=group.topped_up)
        for rollout in fresh:
            group.rollouts[rollout.place], group.ends[rollout.place] = rollout, None
        return fresh

    async def expire(self, group: LiveGroup) -> None:
        """Ends what still runs of a group past its deadline, so that its completed rollouts can be trained."""
        group.expired = True
        message = f"its group took longer than rollout.group_timeout_s = {self.limits.group_timeout_s:g}; raise it or do less"
        for place, end in group.ends.items():
            if end is None:
                await self.pool.end(group.rollouts[place].id, End.TIMEOUT, message)
        for task in list(group.tasks.values()):  # after the ends are stored, so that a cancelled one does not end as CANCELLED
            task.cancel()


class Scheduler:
    """Opens groups in the order of their numbers and runs their rollouts, at most `limits.concurrency` at once.

    Group `seq` may start while `seq // groups_per_step - steps_trained <= max_staleness`; the training loop calls `advance`.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        runner: Runner,
        *,
        pool: Pool,
        events: Events,
        limits: RolloutSection,
        sampling: Sampling,
        seed: int,
        shuffle: bool = True,
        steps: int | None = None,
        steps_trained: int = 0,
        channel: str = "train",
    ) -> None:
        self._tasks, self._runner, self._pool, self._events = tasks, runner, pool, events
        self._limits, self._sampling, self._channel = limits, sampling, channel
        self._seed, self._shuffle = seed, shuffle
        self._steps = steps
        """Training steps to make groups for; None continues until `stop`."""
        self._trained, self._lost = steps_trained, 0
        self._policy = GroupPolicy(pool=pool, events=events, limits=limits)
        self._progress, self._stopped = asyncio.Event(), asyncio.Event()
        self._slots = asyncio.Semaphore(limits.concurrency)

    def advance(self, steps_trained: int) -> None:
        """Sets how many steps have been trained; after the last one, `run` returns."""
        self._trained = steps_trained
        self._progress.set()
        if self._steps is not None and steps_trained >= self._steps:
            self._stopped.set()

    def stop(self) -> None:
        """Makes `run` return. What still runs is cancelled and reopened, for a later run to resume."""
        self._stopped.set()

    async def run(self) -> None:
        """Resumes the groups that an earlier process left, then makes groups until all steps are trained or `stop` is called."""
        self.advance(self._trained)
        try:
            async with asyncio.TaskGroup() as tasks:
                maker = tasks.create_task(self._make_groups())
                await self._stopped.wait()
                maker.cancel()
        except BaseExceptionGroup as group:  # the first error says enough, and reads better alone
            raise next(leaf_errors(group)) from None

    async def _make_groups(self) -> None:
        await self._count_lost()
        async with asyncio.TaskGroup() as self._running:
            for group in sorted(await self._pool.unfinished(self._channel), key=lambda group: group.seq):
                await self._wait_for_admission(group.seq)
                await self._resume(resumed_group(group))
            seq = (await self._pool.stats(self._channel)).last_seq + 1
            while True:
                await self._wait_for_admission(seq)
                numbers = self._next_numbers(seq)
                for group in await asyncio.gather(*map(self._open, numbers)):  # together, so that they share a commit
                    await self._start(group, list(group.rollouts.values()))
                seq = numbers.stop

    def _next_numbers(self, seq: int) -> range:
        """The groups to open from `seq` on, which is admitted: others with it if slots are free, no more than can run at once."""
        most = self._limits.concurrency // self._limits.group_size
        last = seq
        while last - seq + 1 < most and self._admits(last + 1) and not (self._limits.max_waiting or self._slots.locked()):
            last += 1
        return range(seq, last + 1)

    async def _resume(self, group: LiveGroup) -> None:
        """Replaces the attempts that an earlier process did not end; if there are none, tops the group up."""
        running = [group.rollouts[place] for place, end in group.ends.items() if end is None]
        fresh = [await self._pool.replace(rollout, LOST) for rollout in running]
        for rollout in fresh:
            group.rollouts[rollout.place] = rollout
        await self._start(group, fresh or await self._policy.top_up(group))

    async def _wait_for_admission(self, seq: int) -> None:
        while not self._admits(seq):
            self._progress.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_RECHECK_S):
                    await self._progress.wait()
            if not self._admits(seq):
                await self._count_lost()

    async def _count_lost(self) -> None:
        # Stale and dropped groups will never be trained: each admits one more group in its place.
        stats = await self._pool.stats(self._channel)
        self._lost = stats.groups_stale + stats.groups_dropped

    def _admits(self, seq: int) -> bool:
        step = (seq - self._lost) // self._limits.groups_per_step
        return step - self._trained <= self._limits.max_staleness and (self._steps is None or step < self._steps)

    async def _open(self, seq: int) -> LiveGroup:
        name, channel, limits = f"{self._channel}-{seq}", self._channel, self._limits
        task = task_at(self._tasks, seq, seed=self._seed, shuffle=self._shuffle)
        rollouts = [make_rollout(name, task.id, place, channel=channel) for place in range(limits.group_size)]
        limit = limits.max_waiting and GroupLimit(limits.max_waiting, limits.overflow)
        while True:
            position = await self._pool.position() if limit else 0
            try:
                await self._pool.open_group(task, rollouts, seq=seq, min_size=limits.min_size, limit=limit or None)
                break
            except PoolFull as full:
                self._events.emit("pool.full", channel=channel, seq=seq, message=str(full))
                await self._pool.wait(position, timeout_s=_RECHECK_S)
        self._events.emit("group.open", group_id=name, seq=seq, channel=channel, task_id=task.id, rollouts=len(rollouts))
        return new_group(task, rollouts)

    async def _start(self, group: LiveGroup, rollouts: Sequence[RolloutRef]) -> None:
        """Runs rollouts of a group as slots become free."""
        if group.timer is None and self._limits.group_timeout_s is not None:
            loop = asyncio.get_running_loop()
            group.timer = loop.call_later(self._limits.group_timeout_s, self._expire, group)
        for rollout in rollouts:
            await self._slots.acquire()
            if group.expired:
                self._slots.release()
            else:
                group.tasks[rollout.id] = self._running.create_task(self._run(group, rollout))

    def _expire(self, group: LiveGroup) -> None:
        if not group.ended:
            self._running.create_task(self._policy.expire(group))

    async def _run(self, group: LiveGroup, rollout: RolloutRef) -> None:
        end: End | None = End.TIMEOUT
        fresh = None
        try:
            end = await self._runner.run(rollout, group.task, self._sampling)
        except WorkerLost as lost:
            fresh = None if group.expired else await retry_lost(self._pool, rollout, lost, self._limits.retries)
            end = End.LOST
        except asyncio.CancelledError:
            if not group.expired:  # else `GroupPolicy.expire` cancelled it, and the group continues to its end
                await finish_shielded(self._reopen(rollout))
                raise
        finally:
            self._slots.release()
            group.tasks.pop(rollout.id, None)
        if fresh is not None:
            group.rollouts[rollout.place] = fresh
            await self._start(group, [fresh])
            return
        group.ends[rollout.place] = end
        if group.ended:
            fresh = await self._policy.top_up(group)
            await self._start(group, fresh)
            if self._limits.max_waiting or (not fresh and group.failed_below(self._limits.min_size)):
                self._progress.set()  # groups may have been dropped: others take their place
            if not fresh and group.timer is not None:
                group.timer.cancel()

    async def _reopen(self, rollout: RolloutRef) -> None:
        """Keeps a stopped run's group incomplete: the place gets a new attempt, which a later run finds unfinished."""
        if (await self._pool.rollout(rollout.id)).end is End.CANCELLED:
            await self._pool.replace(rollout, REOPENED)


async def retry_lost(pool: Pool, rollout: RolloutRef, lost: WorkerLost, retries: int) -> RolloutRef | None:
    """Replaces an attempt whose worker died, in the same transaction as its end. Returns None after `retries` replacements."""
    if rollout.attempt <= retries:
        return await pool.replace(rollout, str(lost))
    await pool.end(rollout.id, End.LOST, str(lost))
    return None


async def run_to_end(
    rollout: RolloutRef, task: Task, runner: RunnerPort, *, pool: Pool, sampling: Sampling, retries: int
) -> RolloutRef:
    """Runs an opened rollout, again after each loss of its worker. Returns the last attempt."""
    while True:
        try:
            await runner.run(rollout, task, sampling)
            return rollout
        except WorkerLost as lost:
            fresh = await retry_lost(pool, rollout, lost, retries)
            if fresh is None:
                return rollout
            rollout = fresh


async def run_once(
    tasks: Sequence[Task], runner: Runner, *, pool: Pool, sampling: Sampling, limits: RolloutSection, channel: str = "val"
) -> list[str]:
    """Runs one rollout of each task, in groups of one: a held-out evaluation. Returns the rollouts' ids in the order of the tasks.

    An attempt that is lost with its worker is repeated. Only one call at a time per channel: rollouts that an earlier, killed one
    left unfinished are ended as LOST.
    """
    for group in await pool.unfinished(channel):
        for attempt in group.rollouts:
            await pool.end(attempt.ref.id, End.LOST, LOST)
    first = (await pool.stats(channel)).last_seq + 1
    rollouts = [make_rollout(f"{channel}-{seq}", task.id, 0, channel=channel) for seq, task in enumerate(tasks, first)]
    slots = asyncio.Semaphore(limits.concurrency)

    async def run(index: int, task: Task) -> None:
        try:
            rollouts[index] = await run_to_end(rollouts[index], task, runner, pool=pool, sampling=sampling, retries=limits.retries)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as running:
        for index, task in enumerate(tasks):
            await slots.acquire()
            await pool.open_group(task, [rollouts[index]], seq=first + index)
            running.create_task(run(index, task))
    return [rollout.id for rollout in rollouts]
