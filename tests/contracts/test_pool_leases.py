"""The contract of `penstock.pool.base` over every pool in the table: groups are lent, come back, or are trained; and counted."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pool_cases import TASK, FakeClock, claim, complete, finish, ids, make_node, make_step, must_claim, open_groups, places, play

from penstock.errors import PoolError
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End


@pytest.fixture(params=list(POOLS))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Run an act on a new pool of each kind."""
    return partial(play, request.param, tmp_path)


# complete groups are lent in order


def test_a_claim_waits_for_complete_groups(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        first, second = places(0)
        await finish(pool, first)
        assert await claim(pool) is None
        assert ids(await pool.unfinished("train")) == ["train-0"]
        await finish(pool, second, reward=0.0)
        (group,) = (await must_claim(pool)).groups
        assert (group.rewards, group.task) == ([1.0, 0.0], TASK)
        assert group.rollouts[0].steps == (make_step(first.id),)
        assert await pool.unfinished("train") == []

    run(act)


def test_a_group_of_failed_rollouts_is_complete(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, size=3)
        for rollout, end in zip(places(0, 3), (End.AGENT_ERROR, End.TIMEOUT, End.COMPLETED), strict=True):
            await pool.end(rollout.id, end)
        (group,) = (await must_claim(pool)).groups
        assert [attempt.end for attempt in group.rollouts] == [End.AGENT_ERROR, End.TIMEOUT, End.COMPLETED]
        assert group.graded == ()

    run(act)


def test_groups_are_leased_in_order_and_open_ones_skipped(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        await complete(pool, 11, 9, 10, 2)
        assert ids((await must_claim(pool, 3)).groups) == ["train-2", "train-9", "train-10"]
        assert await claim(pool, 2) is None
        assert ids((await must_claim(pool, 1)).groups) == ["train-11"]

    run(act)


def test_a_claim_keeps_to_its_channel(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0)
        assert await pool.claim(1, channel="val", version=0, max_staleness=0, lease_s=1.0) is None

    run(act)


@pytest.mark.parametrize(("count", "lease_s"), [(0, 1.0), (-1, 1.0), (1, -1.0), (1, math.nan)])
def test_a_senseless_claim_is_refused(run, count: int, lease_s: float) -> None:
    async def act(pool: Pool) -> None:
        with pytest.raises(PoolError):
            await claim(pool, count, lease_s=lease_s)

    run(act)


def test_stale_groups_are_dropped_for_good_and_counted_once(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0, 1, version=2)
        await complete(pool, 2, 3, version=3)
        assert await claim(pool, 3, version=5, max_staleness=2) is None
        assert (await pool.stats()).groups_stale == 2
        lease = await must_claim(pool, 1, version=5, max_staleness=2)
        assert (ids(lease.groups), lease.stale) == (["train-2"], 2)
        lease = await must_claim(pool, 1, version=0, max_staleness=0)
        assert (ids(lease.groups), lease.stale) == (["train-3"], 0)

    run(act)


def test_one_old_token_makes_a_group_stale(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, 2)
        first, second = places(0)
        await finish(pool, first, version=9)
        await finish(pool, second, version=1)
        for rollout in places(1):
            await pool.end(rollout.id, End.AGENT_ERROR)
        lease = await must_claim(pool, version=9, max_staleness=1)
        assert (ids(lease.groups), lease.stale) == (["train-1"], 1)

    run(act)


def test_two_claimers_never_get_the_same_group(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, *range(6), size=1)
        async with asyncio.TaskGroup() as tasks:
            claims = [tasks.create_task(claim(pool, 2)) for _ in range(5)]
        leases = [lease for task in claims if (lease := task.result()) is not None]
        assert sorted(group.id for lease in leases for group in lease.groups) == [f"train-{seq}" for seq in range(6)]

    run(act)


# a lease comes back, or is acknowledged


def test_a_released_group_is_lent_again(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0, 1)
        first, second = await must_claim(pool), await must_claim(pool)
        await pool.release(first.id)
        await pool.release(first.id)
        assert ids((await must_claim(pool)).groups) == ids(first.groups)
        await pool.release()
        assert ids((await must_claim(pool, 2)).groups) == ids(first.groups) + ids(second.groups)
        with pytest.raises(PoolError, match="lease"):
            await pool.release("nobody")

    run(act)


def test_expired_lease_returns_automatically(run) -> None:
    clock = FakeClock()

    async def act(pool: Pool) -> None:
        await complete(pool, 0)
        lease = await must_claim(pool, lease_s=60.0)
        clock.now += 59.0
        assert await claim(pool) is None
        await pool.renew(lease.id, 30.0)
        clock.now += 29.0
        assert await claim(pool) is None
        clock.now += 1.0
        with pytest.raises(PoolError, match="expired"):
            await pool.renew(lease.id, 30.0)
        assert (await must_claim(pool)).groups == lease.groups

    run(act, clock=clock)


def test_a_lease_that_is_over_cannot_be_renewed(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0, 1)
        released, trained = await must_claim(pool), await must_claim(pool)
        await pool.release(released.id)
        await pool.ack(trained.id, 1)
        for lease_id in (released.id, trained.id, "nobody"):
            with pytest.raises(PoolError):
                await pool.renew(lease_id, 60.0)

    run(act)


def test_an_acknowledged_group_is_trained_for_good(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0, 1, 2)
        first, second = await must_claim(pool, 2), await must_claim(pool)
        await pool.ack(second.id, 1)
        for _ in range(2):
            await pool.ack(first.id, 2)
        await pool.release()
        await pool.release(first.id)
        assert await claim(pool) is None
        assert await pool.trained() == [("train-2", 1), ("train-0", 2), ("train-1", 2)]
        with pytest.raises(PoolError, match="trained"):
            await pool.ack(first.id, 3)

    run(act)


def test_lease_that_ran_out_is_acknowledged_if_nobody_took_it(run) -> None:
    clock = FakeClock()

    async def act(pool: Pool) -> None:
        await complete(pool, 0, 1, 2)
        expired, released, stale = await must_claim(pool, lease_s=1.0), await must_claim(pool), await must_claim(pool)
        clock.now += 2.0
        assert await claim(pool, 3) is None
        await pool.ack(expired.id, 1)
        await pool.release(released.id)
        await pool.ack(released.id, 2)
        await pool.release(stale.id)
        assert await claim(pool, version=50) is None
        await pool.ack(stale.id, 3)
        assert await pool.trained() == [("train-0", 1), ("train-1", 2), ("train-2", 3)]
        assert ((await pool.stats()).groups_trained, (await pool.stats()).groups_stale) == (3, 0)

    run(act, clock=clock)


def test_a_lease_whose_groups_went_to_another_is_not_acknowledged(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0, 1)
        late = await must_claim(pool, 2)
        await pool.release(late.id)
        holder = await must_claim(pool)
        with pytest.raises(PoolError, match=f"{holder.id!r}"):
            await pool.ack(late.id, 1)
        await pool.release(late.id)
        assert (await pool.stats()).groups_leased == 1
        await pool.ack(holder.id, 1)
        with pytest.raises(PoolError, match="trained"):
            await pool.ack(late.id, 1)
        assert await pool.trained() == [("train-0", 1)]
        assert ids((await must_claim(pool)).groups) == ["train-1"]
        with pytest.raises(PoolError, match="lease"):
            await pool.ack("nobody", 1)

    run(act)


def test_statistics_count_a_channel_or_all(run) -> None:
    async def act(pool: Pool) -> None:
        assert await pool.stats() == type(await pool.stats())()
        await complete(pool, 0, 1, version=4)
        await complete(pool, 2, version=0)
        await open_groups(pool, first=7, size=3, channel="val")
        await pool.append(make_step("val-7.0.1"), make_node("val-7.0.1", reason="history edited"))
        await pool.replace(places(7, channel="val")[0], "gone")
        await pool.ack((await must_claim(pool, version=3, max_staleness=1)).id, 9)
        await must_claim(pool)
        train, val, both = await pool.stats("train"), await pool.stats("val"), await pool.stats()
        assert (train.groups, train.groups_complete, train.groups_leased, train.groups_trained, train.groups_stale) == (
            3,
            3,
            1,
            1,
            1,
        )
        assert (train.rollouts, train.steps, train.tokens, train.prompt_tokens) == (6, 6, 18, 18)
        assert (train.ends, train.last_seq, train.last_version) == ({"completed": 6}, 2, 9)
        assert (val.groups, val.groups_complete, val.rollouts, val.ends, val.breaks) == (
            1,
            0,
            4,
            {"lost": 1},
            {"history edited": 1},
        )
        assert (both.groups, both.last_seq, both.last_version, both.tokens, val.last_version) == (4, 7, 9, 21, 1)

    run(act)


# training that is lost with its weights


def test_groups_of_lost_versions_are_leased_again(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        await complete(pool, 0, 1, 2)
        for version in (1, 2, 3):
            await pool.ack((await must_claim(pool)).id, version)
        assert await pool.undo(1) == [("train-1", 2), ("train-2", 3)]
        assert await pool.undo(1) == []
        stats = await pool.stats("train")
        assert (stats.groups_trained, stats.groups_leased, stats.last_version) == (1, 0, 3)
        assert [change.id for change in await pool.changes() if change.kind == "undone"] == ["train-1", "train-2"]
        again = await must_claim(pool, 2)
        assert ids(again.groups) == ["train-1", "train-2"]
        await pool.ack(again.id, 4)
        assert await pool.trained() == [("train-0", 1), ("train-1", 4), ("train-2", 4)]

    run(act)


def test_the_first_run_that_a_pool_is_given_stays(run) -> None:
    async def act(pool: Pool) -> None:
        assert await pool.run_id() == ""
        await pool.set_run_id("a")
        await pool.set_run_id("b")
        assert await pool.run_id() == "a"
        assert (await pool.channels(), (await pool.stats()).groups) == ([], 0)

    run(act)
