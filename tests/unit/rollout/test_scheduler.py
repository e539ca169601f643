"""The scheduler: which groups are opened when, what is taken up again, and how it stops."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import RolloutSection
from penstock.errors import PoolError, WorkerLost
from penstock.events import Events
from penstock.pool.memory import MemoryPool
from penstock.records import End, Sampling, Task, make_rollout
from penstock.rollout.scheduler import Scheduler, run_once, task_at

DEADLINE_S = 20


def make_tasks(count):
    return [Task(id=f"t{i}", prompt=({"role": "user", "content": str(i)},), label=str(i)) for i in range(count)]


class FakeRunner:
    """Ends each rollout as completed, once `gate` lets it; cancelled, it ends it so, as the real one does."""

    def __init__(self, pool, gate=None):
        self.pool, self.gate = pool, gate or asyncio.Event()
        self.started, self.running, self.most = [], 0, 0
        self.changed = asyncio.Condition()
        if gate is None:
            self.gate.set()

    async def run(self, rollout, task, sampling):
        await self._tell(+1, rollout)
        try:
            await self.gate.wait()
            await self.pool.end(rollout.id, End.COMPLETED)
        except asyncio.CancelledError:
            await self.pool.end(rollout.id, End.CANCELLED)
            raise
        finally:
            self.running -= 1
        await self._tell(0)
        return End.COMPLETED

    async def _tell(self, change, rollout=None):
        async with self.changed:
            self.running += change
            self.most = max(self.most, self.running)
            self.started += [rollout] if rollout else []
            self.changed.notify_all()

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(condition)


def scheduler(pool, runner, *, tasks=8, steps=None, trained=0, **limits):
    section = RolloutSection(**{"group_size": 2, "groups_per_step": 2, "concurrency": 8, **limits})
    return Scheduler(
        make_tasks(tasks),
        runner,
        pool=pool,
        events=Events(),
        limits=section,
        sampling=Sampling(),
        seed=0,
        steps=steps,
        steps_trained=trained,
    )


@contextlib.asynccontextmanager
async def at_work(made):
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(made.run())
        yield
        made.stop()


async def idle():
    """Let everything that is ready run, the pool's threads included."""
    for _ in range(25):
        await asyncio.sleep(0.002)


def new_pool():
    return MemoryPool(Path())


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_each_epoch_takes_every_task_once(count, seed, epoch):
    tasks = make_tasks(count)
    drawn = [task_at(tasks, seq, seed=seed).id for seq in range(epoch * count, (epoch + 1) * count)]
    assert sorted(drawn) == sorted(task.id for task in tasks)


def test_order_depends_on_seed_and_epoch_alone():
    tasks = make_tasks(50)
    first, second = ([task_at(tasks, seq, seed=1).id for seq in range(start, start + 50)] for start in (0, 50))
    assert first != second
    assert first != [task_at(tasks, seq, seed=2).id for seq in range(50)]
    assert first[:3] == ["t5", "t23", "t41"]  # the same in every process and on every Python


def test_without_shuffle_tasks_come_in_file_order():
    assert [task_at(make_tasks(3), seq, seed=1, shuffle=False).id for seq in range(5)] == ["t0", "t1", "t2", "t0", "t1"]


@pytest.mark.parametrize(("staleness", "ahead"), [(0, 2), (1, 4), (3, 8)])
def test_groups_open_no_further_ahead_than_staleness_allows(staleness, ahead):
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool)
        made = scheduler(pool, runner, max_staleness=staleness)
        async with at_work(made):
            await runner.until(lambda: len(runner.started) == 2 * ahead)
            await idle()
            assert len(await pool.groups("train")) == ahead
            made.advance(1)
            await runner.until(lambda: len(runner.started) == 2 * (ahead + 2))
            await idle()
            assert [group.seq for group in await pool.groups("train")] == list(range(ahead + 2))

    asyncio.run(main())


class GatheringPool(MemoryPool):
    """Opens groups only once `wanted` of them are waiting: one commit for all."""

    def __init__(self, wanted):
        super().__init__(Path())
        self.wanted, self.waiting, self.all_here = wanted, [], asyncio.Event()

    async def open_group(self, task, rollouts, *, seq, **options):
        self.waiting.append(seq)
        if len(self.waiting) == self.wanted:
            self.all_here.set()
        await self.all_here.wait()
        await super().open_group(task, rollouts, seq=seq, **options)


def test_groups_that_can_run_at_once_are_opened_together():
    async def main():
        pool = GatheringPool(3)
        runner = FakeRunner(pool, asyncio.Event())
        async with at_work(scheduler(pool, runner, groups_per_step=4, concurrency=7)):
            await runner.until(lambda: len(runner.started) == 7)
            await idle()
            assert pool.waiting == [0, 1, 2, 3]  # the fourth on its own, as the first of its rollouts found a slot
            assert [(rollout.group_id, rollout.place) for rollout in runner.started[:3]] == [
                ("train-0", 0),
                ("train-0", 1),
                ("train-1", 0),
            ]

    asyncio.run(main())


def test_limited_groups_are_opened_one_by_one():
    async def main():
        pool = GatheringPool(1)
        runner = FakeRunner(pool, asyncio.Event())
        async with at_work(scheduler(pool, runner, groups_per_step=4, concurrency=4, max_waiting=8)):
            await runner.until(lambda: len(runner.started) == 4)
            while len(pool.waiting) < 3:
                await idle()
            assert pool.waiting == [0, 1, 2]

    asyncio.run(main())


def test_a_step_opens_its_groups_without_asking_for_statistics():
    class CountingPool(MemoryPool):
        asked = 0

        async def stats(self, channel=None):
            self.asked += 1
            return await super().stats(channel)

    async def main():
        pool = CountingPool(Path())
        runner = FakeRunner(pool)
        made = scheduler(pool, runner)
        async with at_work(made):
            await runner.until(lambda: len(runner.started) == 4)
            await idle()
            asked = pool.asked
            made.advance(1)
            await runner.until(lambda: len(runner.started) == 8)
            assert pool.asked == asked

    asyncio.run(main())


def test_groups_that_complete_are_not_reason_to_ask_for_statistics():
    class CountingPool(MemoryPool):
        asked = 0

        async def stats(self, channel=None):
            self.asked += 1
            return await super().stats(channel)

    async def main():
        pool, gate = CountingPool(Path()), asyncio.Event()
        runner = FakeRunner(pool, gate)
        made = scheduler(pool, runner, min_size=1)
        async with at_work(made):
            await runner.until(lambda: len(runner.started) == 4)
            await idle()
            asked = pool.asked
            gate.set()
            await runner.until(lambda: not runner.running)
            await idle()
            assert pool.asked == asked

    asyncio.run(main())


def test_run_opens_no_group_beyond_the_last_step():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool)
        made = scheduler(pool, runner, steps=2, max_staleness=5)
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(made.run())
            await runner.until(lambda: len(runner.started) == 8)
            await idle()
            made.advance(2)
        assert (await pool.stats("train")).groups == 4
        assert (await pool.stats("train")).ends == {"completed": 8}

    asyncio.run(main())


def test_no_more_rollouts_run_at_once_than_allowed():
    async def main():
        pool, gate = new_pool(), asyncio.Event()
        runner = FakeRunner(pool, gate)
        made = scheduler(pool, runner, group_size=4, concurrency=3, steps=1)
        async with at_work(made):
            await runner.until(lambda: runner.running == 3)
            await idle()
            assert runner.running == 3
            gate.set()
            await runner.until(lambda: len(runner.started) == 8 and runner.running == 0)
        assert runner.most == 3

    asyncio.run(main())


def test_rollouts_of_group_share_task_and_have_places_in_order():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool)
        async with at_work(scheduler(pool, runner, steps=1)):
            await runner.until(lambda: len(runner.started) == 4)
        assert [r.id for r in runner.started] == ["train-0.0.1", "train-0.1.1", "train-1.0.1", "train-1.1.1"]
        tasks = make_tasks(8)
        assert [g.task for g in await pool.groups("train")] == [task_at(tasks, seq, seed=0) for seq in (0, 1)]

    asyncio.run(main())


async def open_half_finished_group(pool, seq):
    task = task_at(make_tasks(8), seq, seed=0)
    rollouts = [make_rollout(f"train-{seq}", task.id, place) for place in (0, 1)]
    await pool.open_group(task, rollouts, seq=seq)
    await pool.end(rollouts[0].id, End.COMPLETED)


def test_unfinished_groups_come_first():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool)
        await open_half_finished_group(pool, 0)
        async with at_work(scheduler(pool, runner, steps=1)):
            await runner.until(lambda: len(runner.started) == 3)
        assert [r.id for r in runner.started] == ["train-0.1.2", "train-1.0.1", "train-1.1.1"]
        assert (await pool.rollout("train-0.1.1")).end is End.LOST

    asyncio.run(main())


def test_unfinished_group_of_a_later_step_waits_for_its_turn():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool)
        await open_half_finished_group(pool, 2)  # left by a process whose checkpoint of step 1 never reached the disk
        made = scheduler(pool, runner, steps=4)
        async with at_work(made):
            await idle()
            assert runner.started == []
            made.advance(1)
            await runner.until(lambda: len(runner.started) == 3)
        assert [r.id for r in runner.started] == ["train-2.1.2", "train-3.0.1", "train-3.1.1"]

    asyncio.run(main())


def test_stop_cancels_and_leaves_rollouts_open():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool, asyncio.Event())
        async with at_work(scheduler(pool, runner, steps=1)):
            await runner.until(lambda: runner.running == 4)
        assert (await pool.stats("train")).ends == {"cancelled": 4}
        assert [g.seq for g in await pool.unfinished("train")] == [0, 1]

        later = FakeRunner(pool)
        async with at_work(scheduler(pool, later, steps=1)):
            await later.until(lambda: len(later.started) == 4 and later.running == 0)
        assert [r.attempt for r in later.started] == [3, 3, 3, 3]
        assert await pool.unfinished("train") == []

    asyncio.run(main())


def test_a_rollout_that_completed_while_the_run_stopped_stays_completed():
    class CompletesFirst(FakeRunner):
        async def run(self, rollout, task, sampling):
            await self.pool.end(rollout.id, End.COMPLETED)
            await super().run(rollout, task, sampling)

    async def main():
        pool = new_pool()
        runner = CompletesFirst(pool, asyncio.Event())
        async with at_work(scheduler(pool, runner, steps=1)):
            await runner.until(lambda: runner.running == 4)
        assert (await pool.stats("train")).ends == {"completed": 4}
        assert await pool.unfinished("train") == []

    asyncio.run(main())


def test_cancelling_run_from_outside_also_leaves_it_resumable():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool, asyncio.Event())
        job = asyncio.create_task(scheduler(pool, runner, steps=1).run())
        await runner.until(lambda: runner.running == 4)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert len(await pool.unfinished("train")) == 2

    asyncio.run(main())


def test_failing_pool_stops_the_run_with_its_own_error():
    class Broken(FakeRunner):
        async def run(self, rollout, task, sampling):
            raise PoolError("disk is full")

    async def main():
        pool = new_pool()
        with pytest.raises(PoolError, match="disk"):
            await asyncio.wait_for(scheduler(pool, Broken(pool)).run(), DEADLINE_S)

    asyncio.run(main())


@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_dropped_as_stale_are_made_up_for(monkeypatch, staleness):
    monkeypatch.setattr("penstock.rollout.scheduler._RECHECK_S", 0.01)  # a constant with no seam: nobody turns it

    class Stale:
        def __init__(self, pool):
            self.pool, self.dropped = pool, 0

        def __getattr__(self, name):
            return getattr(self.pool, name)

        async def stats(self, channel):
            return dataclasses.replace(await self.pool.stats(channel), groups_stale=self.dropped)

    async def main():
        pool = Stale(new_pool())
        runner = FakeRunner(pool)
        async with at_work(scheduler(pool, runner, steps=1, max_staleness=staleness)):
            await runner.until(lambda: len(runner.started) == 4)
            pool.dropped = 1
            await runner.until(lambda: len(runner.started) == 6)
        assert [group.seq for group in await pool.groups("train")] == [0, 1, 2]

    asyncio.run(main())


async def tried_once(tasks, runner, pool, *, concurrency=1, **limits):
    names = await run_once(tasks, runner, pool=pool, sampling=Sampling(), limits=RolloutSection(concurrency=concurrency, **limits))
    return [await pool.rollout(name) for name in names]


def test_run_once_returns_rollouts_in_order():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool)
        tasks = make_tasks(10)
        first = await tried_once(tasks, runner, pool, concurrency=3)
        second = await tried_once(tasks[:2], runner, pool, concurrency=3)
        assert [a.ref.task_id for a in first] == [task.id for task in tasks]
        assert [a.ref.id for a in second] == ["val-10.0.1", "val-11.0.1"]
        assert Counter(a.end for a in first) == {End.COMPLETED: 10}
        assert runner.most <= 3

    asyncio.run(main())


def test_run_once_ends_what_a_killed_evaluation_left():
    async def main():
        pool = new_pool()
        task = make_tasks(1)[0]
        await pool.open_group(task, [make_rollout("val-0", task.id, 0, channel="val")], seq=0)
        (attempt,) = await tried_once([task], FakeRunner(pool), pool)
        assert attempt.ref.id == "val-1.0.1"
        assert (await pool.rollout("val-0.0.1")).end is End.LOST

    asyncio.run(main())


class FailingRunner(FakeRunner):
    """Ends each rollout as `ends` says for its place and attempt, else as completed; `hangs` ones run until they are cancelled."""

    def __init__(self, pool, ends=(), hangs=()):
        super().__init__(pool)
        self.ends, self.hangs = dict(ends), set(hangs)

    async def run(self, rollout, task, sampling):
        await self._tell(+1, rollout)
        try:
            if (rollout.place, rollout.attempt) in self.hangs:
                await asyncio.Event().wait()
            end = self.ends.get((rollout.place, rollout.attempt), End.COMPLETED)
            if end is End.LOST:
                raise WorkerLost("worker 1 died")
            await self.pool.end(rollout.id, end)
            return end
        except asyncio.CancelledError:
            await self.pool.end(rollout.id, End.CANCELLED)
            raise
        finally:
            self.running -= 1
            await self._tell(0)


def first_group(pool, runner, **limits):
    """Waits until a group can be claimed or was dropped. Returns the first group and the pool's counts."""

    async def main():
        made = scheduler(pool, runner, groups_per_step=1, **limits)
        async with at_work(made):
            position = 0
            while (stats := await pool.stats("train")).groups_dropped + claimable(stats) == 0:
                await pool.wait(position, timeout_s=DEADLINE_S)
                position = await pool.position()
        return (await pool.groups("train", limit=1))[0], stats

    return asyncio.run(main())


def claimable(stats):
    return stats.groups_complete - stats.groups_short - stats.groups_dropped


def test_failed_attempts_are_made_up_for_where_too_few_completed():
    pool = new_pool()
    group, stats = first_group(pool, FailingRunner(pool, {(0, 1): End.AGENT_ERROR}), min_size=2, top_up=1)
    assert [(a.ref.attempt, a.end) for a in group.rollouts] == [(2, End.COMPLETED), (1, End.COMPLETED)]
    assert (stats.ends["agent_error"], stats.groups_dropped) == (1, 0)


def test_attempt_that_was_lost_with_its_worker_is_made_again():
    pool = new_pool()
    group, stats = first_group(pool, FailingRunner(pool, {(0, 1): End.LOST, (0, 2): End.LOST}))
    assert [(a.ref.attempt, a.end) for a in group.rollouts] == [(3, End.COMPLETED), (1, End.COMPLETED)]
    assert stats.ends == {"lost": 2, "completed": 2}


def test_an_attempt_that_is_lost_again_and_again_stays_lost():
    pool = new_pool()
    group, _ = first_group(pool, FailingRunner(pool, {(0, n): End.LOST for n in (1, 2, 3)}), retries=2)
    first = group.rollouts[0]
    assert (first.ref.attempt, first.end, first.message) == (3, End.LOST, "worker 1 died")


def test_a_lost_evaluation_rollout_is_tried_again():
    async def main():
        pool = new_pool()
        runner = FailingRunner(pool, {(0, 1): End.LOST})
        done = await tried_once(make_tasks(3), runner, pool, concurrency=2)
        assert [(a.ref.id, a.end) for a in done] == [(f"val-{n}.0.2", End.COMPLETED) for n in range(3)]
        kept = await tried_once(make_tasks(1), FailingRunner(pool, {(0, 1): End.LOST}), pool, retries=0)
        assert [a.end for a in kept] == [End.LOST]

    asyncio.run(main())


def test_enough_completed_attempts_are_not_topped_up():
    pool = new_pool()
    group, _ = first_group(pool, FailingRunner(pool, {(0, 1): End.TIMEOUT}), min_size=1, top_up=3)
    assert [(a.ref.attempt, a.end) for a in group.rollouts] == [(1, End.TIMEOUT), (1, End.COMPLETED)]


def test_group_that_stays_short_is_replaced():
    async def main():
        pool = new_pool()
        ends = {(place, attempt): End.AGENT_ERROR for place in (0, 1) for attempt in (1, 2)}
        runner = FailingRunner(pool, ends)
        made = scheduler(pool, runner, groups_per_step=1, min_size=1, top_up=1)
        async with at_work(made):
            await runner.until(lambda: any(rollout.group_id == "train-1" for rollout in runner.started))
        stats = await pool.stats("train")
        assert stats.drops["too few rollouts completed"] >= 1
        assert sum(rollout.group_id == "train-0" for rollout in runner.started) == 4

    asyncio.run(main())


def test_one_that_never_ends_does_not_stall_group_past_deadline():
    pool = new_pool()
    group, stats = first_group(pool, FailingRunner(pool, hangs={(0, 1)}), min_size=1, group_timeout_s=0.05)
    assert [a.end for a in group.rollouts] == [End.TIMEOUT, End.COMPLETED]
    assert "rollout.group_timeout_s = 0.05" in group.rollouts[0].message
    assert stats.groups_dropped == 0


def test_no_more_groups_wait_than_may():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool)
        made = scheduler(pool, runner, max_staleness=5, max_waiting=3)
        async with at_work(made):
            await runner.until(lambda: len(runner.started) == 6)
            await idle()
            assert (await pool.stats("train")).groups == 3
            lease = await pool.claim(1, version=0, max_staleness=9, lease_s=60)
            await pool.ack(lease.id, 1)
            await runner.until(lambda: len(runner.started) == 8)

    asyncio.run(main())


def test_the_oldest_makes_room_where_that_is_wanted():
    async def main():
        pool = new_pool()
        runner = FakeRunner(pool)
        made = scheduler(pool, runner, max_staleness=1, max_waiting=3, overflow="drop")
        async with at_work(made):
            await runner.until(lambda: len(runner.started) >= 8)
        assert (await pool.stats("train")).drops["overflow"] >= 1

    asyncio.run(main())


def test_short_group_that_earlier_process_left_is_topped_up():
    async def main():
        pool = new_pool()
        rollouts = [make_rollout("train-0", "t0", place) for place in range(2)]
        await pool.open_group(make_tasks(1)[0], rollouts, seq=0, min_size=2)
        await pool.end(rollouts[0].id, End.COMPLETED)
        await pool.end(rollouts[1].id, End.AGENT_ERROR)
        runner = FakeRunner(pool)
        async with at_work(scheduler(pool, runner, min_size=2, top_up=1)):
            await runner.until(lambda: runner.started)
            assert runner.started[0].id == "train-0.1.2"

    asyncio.run(main())
