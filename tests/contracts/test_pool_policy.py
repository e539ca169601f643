"""The contract of `penstock.pool.base`: groups that come up short, queues with an end, curators, and what viewers follow."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pool_cases import TASK, claim, complete, finish, ids, must_claim, open_groups, open_one, places, play

from penstock.errors import PoolError, PoolFull
from penstock.pool import POOLS
from penstock.pool.base import GroupLimit, Pool
from penstock.records import End, Mark

DURABLE = [name for name in POOLS if POOLS.load(name).durable]


@pytest.fixture(params=list(POOLS))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Run an act on a new pool of each kind."""
    return partial(play, request.param, tmp_path)


async def open_short(pool: Pool, seq: int = 0) -> None:
    """A group of two that needs both, of which one fails."""
    await pool.open_group(TASK, places(seq), seq=seq, min_size=2)
    await finish(pool, places(seq)[0])
    await pool.end(places(seq)[1].id, End.TIMEOUT, "slow")


# groups that come up short


def test_short_group_is_neither_leased_nor_lost(run) -> None:
    async def act(pool: Pool) -> None:
        await open_short(pool)
        assert await claim(pool) is None
        assert ids(await pool.unfinished("train")) == ["train-0"]
        assert ((await pool.stats()).groups_short, (await pool.stats()).groups_complete) == (1, 1)

    run(act)


def test_short_group_is_complete_after_a_replacement(run) -> None:
    async def act(pool: Pool) -> None:
        await open_short(pool)
        await finish(pool, await pool.replace(places(0)[1], "top up"))
        lease = await must_claim(pool)
        assert [attempt.ref.attempt for attempt in lease.groups[0].rollouts] == [1, 2]
        assert ((await pool.stats()).groups_short, (await pool.stats()).ends) == (0, {"completed": 2, "timeout": 1})

    run(act)


def test_a_stuck_group_does_not_hold_up_those_after_it(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        await open_short(pool, 1)
        await complete(pool, 2)
        assert ids((await must_claim(pool)).groups) == ["train-2"]

    run(act)


def test_a_dropped_group_is_counted_by_reason_and_never_lent(run) -> None:
    async def act(pool: Pool) -> None:
        await open_short(pool)
        assert await pool.drop("train-0", "too few completed")
        assert not await pool.drop("train-0", "again")
        stats = await pool.stats("train")
        assert (stats.groups_dropped, stats.drops, stats.groups_short) == (1, {"too few completed": 1}, 0)
        assert (await claim(pool), await pool.unfinished("train")) == (None, [])
        with pytest.raises(PoolError, match="trainer"):
            await pool.replace(places(0)[1], "late")

    run(act)


def test_running_leased_or_unknown_group_cannot_be_dropped(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        await complete(pool, 1)
        lease = await must_claim(pool)
        for name, why in (("train-0", "has rollouts that run"), ("train-1", "was lent"), ("train-9", "no group 'train-9'")):
            with pytest.raises(PoolError, match=why):
                await pool.drop(name, "x")
        await pool.ack(lease.id, 1)
        assert not await pool.drop("train-1", "x")

    run(act)


# queues with an end


def test_a_full_queue_refuses_one_more_until_there_is_room(run) -> None:
    async def act(pool: Pool) -> None:
        limit = GroupLimit(2, "refuse")
        await complete(pool, 0, 1)
        with pytest.raises(PoolFull, match="train"):
            await pool.open_group(TASK, places(2), seq=2, limit=limit)
        await pool.open_group(TASK, places(1), seq=1, limit=limit)  # it is there already
        await pool.open_group(TASK, places(0, channel="val"), seq=0, limit=limit)
        await pool.ack((await must_claim(pool)).id, 1)
        await pool.open_group(TASK, places(2), seq=2, limit=limit)
        assert (await pool.stats("train")).groups == 3

    run(act)


def test_returned_group_can_be_dropped(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0, 1)
        await pool.release((await must_claim(pool, 2)).id)
        assert [await pool.drop("train-0", "crashed the trainer") for _ in range(2)] == [True, False]
        lease = await must_claim(pool)
        await pool.ack(lease.id, 1)
        assert (ids(lease.groups), await pool.trained()) == (["train-1"], [("train-1", 1)])
        assert (await pool.stats()).drops == {"crashed the trainer": 1}

    run(act)


def test_a_full_queue_drops_its_oldest_complete_group(run) -> None:
    async def act(pool: Pool) -> None:
        limit = GroupLimit(2, "drop")
        await open_groups(pool)
        await complete(pool, 1)
        await pool.open_group(TASK, places(2), seq=2, limit=limit)
        assert (await pool.stats()).drops == {"overflow": 1}
        with pytest.raises(PoolFull):  # two run, and what runs is not dropped
            await pool.open_group(TASK, places(3), seq=3, limit=limit)
        assert await claim(pool) is None

    run(act)


# curators


def test_the_last_word_of_a_curator_reaches_the_lease(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0)
        first, second = places(0)
        assert await pool.mark(Mark(rollout_id=first.id, trainable=False))
        assert await pool.mark(Mark(rollout_id=first.id, quality=0.5, note="half right"))
        assert await pool.mark(Mark(rollout_id=second.id, step=0, trainable=False))
        lease = await must_claim(pool)
        assert [attempt.marks for attempt in lease.groups[0].rollouts] == [
            (Mark(rollout_id=first.id, quality=0.5, note="half right"),),
            (Mark(rollout_id=second.id, step=0, trainable=False),),
        ]
        assert not await pool.mark(Mark(rollout_id=first.id, note="too late"))

    run(act)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rollout_id": "nobody"}, "no rollout 'nobody'"),
        ({"step": 7}, "there is no such step"),
        ({"quality": float("nan")}, "give a finite number"),
        ({"quality": -1.0}, "0 or more"),
    ],
)
def test_a_mark_on_nothing_or_with_no_weight_is_refused(run, fields: dict[str, Any], why: str) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0)
        with pytest.raises(PoolError, match=why):
            await pool.mark(Mark(**{"rollout_id": places(0)[0].id, **fields}))

    run(act)


# what viewers follow


def test_changes_are_read_in_pages_from_where_one_stopped(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0, size=1)
        first = await pool.changes(limit=2)
        rest = await pool.changes(first[-1].position)
        assert [(change.kind, change.id) for change in [*first, *rest]] == [
            ("opened", "train-0"),
            ("graded", "train-0.0.1"),
            ("ended", "train-0.0.1"),
        ]
        assert await pool.changes(rest[-1].position) == []

    run(act)


def test_waiter_is_woken_by_a_change(run) -> None:
    async def act(pool: Pool) -> None:
        assert not await pool.wait(0, timeout_s=0.01)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.wait(0, timeout_s=60))
            await asyncio.sleep(0)
            await open_groups(pool)
        assert waiting.result() and await pool.wait(0, timeout_s=0)

    run(act)


@pytest.mark.parametrize("name", DURABLE)
def test_who_waits_is_woken_by_another_process(name: str, tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        theirs = open_one(name, tmp_path)
        try:
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                waiting = group.create_task(pool.wait(0, timeout_s=60))
                await open_groups(theirs)
            assert waiting.result()
        finally:
            await theirs.close()

    play(name, tmp_path, act)
