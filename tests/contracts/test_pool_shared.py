"""The contract of `penstock.pool.base` for several processes: numbers given out by the pool, reads of what is new, conflicts."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from pool_cases import KINDS, TASK, make_node, make_step, open_groups, places, play

from penstock.errors import PoolConflict, PoolError
from penstock.pool.base import Pool
from penstock.pool.sqlite import migrate, open_database
from penstock.records import make_rollout


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Run an act on a new pool of each kind."""
    return partial(play, request.param, tmp_path)


def test_only_steps_and_nodes_from_a_number_on_are_read(run) -> None:
    rollout = places(0)[0].id

    async def act(pool: Pool) -> None:
        await open_groups(pool)
        for index in range(4):
            await pool.append(make_step(rollout, index), make_node(rollout, index, parent=index - 1 if index else None))
        new = await pool.rollout(rollout, first_step=2, first_node=3)
        assert ([step.index for step in new.steps], [node.id for node in new.nodes]) == ([2, 3], [3])
        nothing = await pool.rollout(rollout, first_step=4, first_node=4)
        assert (nothing.steps, nothing.nodes, nothing.ref) == ((), (), places(0)[0])

    run(act)


def test_groups_opened_without_number_get_next_ones_of_their_channel(run) -> None:
    async def act(pool: Pool) -> None:
        await pool.open_group(TASK, places(7), seq=7)
        async with asyncio.TaskGroup() as group:
            for name in "abcdefgh":
                group.create_task(pool.open_group(TASK, [make_rollout(name, TASK.id, 0, channel="adhoc")], seq=None))
        await pool.open_group(TASK, [make_rollout("late", TASK.id, 0)], seq=None)
        assert [group.seq for group in await pool.groups("adhoc")] == list(range(8))
        assert [group.seq for group in await pool.groups("train")] == [7, 8]

    run(act)


def test_a_group_that_is_there_keeps_its_number(run) -> None:
    async def act(pool: Pool) -> None:
        for _ in range(2):
            await pool.open_group(TASK, places(0), seq=None)
        assert [group.seq for group in await pool.groups("train")] == [0]

    run(act)


def test_a_rollout_knows_its_task(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        assert await pool.task(places(0)[1].id) == TASK
        with pytest.raises(PoolError, match="nobody"):
            await pool.task("nobody")

    run(act)


def test_second_value_under_an_index_is_a_conflict(run) -> None:
    rollout = places(0)[0].id

    async def act(pool: Pool) -> None:
        await open_groups(pool)
        await pool.append(make_step(rollout), make_node(rollout))
        with pytest.raises(PoolConflict):
            await pool.append(make_step(rollout, completion_ids=(1, 2, 3)), None)
        with pytest.raises(PoolConflict):
            await pool.append(make_step(rollout, 1, node=0), make_node(rollout, 0, token_ids=(9,)))
        with pytest.raises(PoolError) as error:
            await pool.append(make_step(rollout, 1), make_node(rollout, 1, parent=5))
        assert not isinstance(error.value, PoolConflict)
        assert len((await pool.rollout(rollout)).steps) == 1

    run(act)


def test_a_pool_that_many_make_at_once_is_one_pool(tmp_path: Path) -> None:
    """Threads lock the file against each other as processes do, and start closer together."""
    at_once = 8

    def make(barrier: threading.Barrier, path: Path) -> None:
        barrier.wait()
        database = open_database(path)
        migrate(database)
        database.close()

    with ThreadPoolExecutor(at_once) as threads:
        for trial in range(20):
            path, barrier = tmp_path / f"pool-{trial}.db", threading.Barrier(at_once)
            for made in [threads.submit(make, barrier, path) for _ in range(at_once)]:
                made.result()
