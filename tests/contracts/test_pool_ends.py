"""The contract of `penstock.pool.base` over every pool in the table: how a rollout is graded and ends."""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pool_cases import KINDS, TASK, ids, make_node, make_step, must_claim, open_groups, places, play

from penstock.errors import PoolError
from penstock.pool.base import Pool
from penstock.records import End, Grade


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Run an act on a new pool of each kind."""
    return partial(play, request.param, tmp_path)


def test_an_end_happens_once_and_the_first_stays(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        assert await pool.end("train-0.0.1", End.AGENT_ERROR, "boom \ud800")
        assert not await pool.end("train-0.0.1", End.COMPLETED, "all well")
        attempt = await pool.rollout("train-0.0.1")
        assert (attempt.end, attempt.message) == (End.AGENT_ERROR, "boom \ud800")
        with pytest.raises(PoolError):
            await pool.end("nobody", End.COMPLETED)

    run(act)


def test_concurrent_ends_have_one_winner(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(pool.end("train-0.0.1", end)) for end in End]
        assert [end.result() for end in ends].count(True) == 1

    run(act)


def test_late_writes_are_refused(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        await pool.end("train-0.0.1", End.CANCELLED)
        with pytest.raises(PoolError, match="cancelled"):
            await pool.append(make_step("train-0.0.1"), make_node("train-0.0.1"))
        with pytest.raises(PoolError, match="late"):
            await pool.grade(Grade(rollout_id="train-0.0.1", reward=1.0, source="g"))
        attempt = await pool.rollout("train-0.0.1")
        assert (attempt.nodes, attempt.steps, attempt.grades) == ((), (), ())

    run(act)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None, "1", True])
def test_a_reward_that_is_no_finite_number_is_refused(run, reward: Any) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        with pytest.raises(PoolError, match="finite"):
            await pool.grade(Grade(rollout_id="train-0.0.1", reward=reward, source="g"))
        assert (await pool.rollout("train-0.0.1")).grades == ()

    run(act)


def test_a_grade_is_given_once_per_source_and_target(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        grade = Grade(rollout_id="train-0.0.1", reward=1, source="g")
        others = [replace(grade, source="h"), replace(grade, transcript="main"), replace(grade, step=0)]
        for given in (grade, grade, *others):
            await pool.grade(given)
        with pytest.raises(PoolError, match="stays"):
            await pool.grade(replace(grade, reward=0.0))
        with pytest.raises(PoolError, match="rollout"):
            await pool.grade(replace(grade, rollout_id="nobody"))
        assert (await pool.rollout("train-0.0.1")).grades == (grade, *others)

    run(act)


def test_an_end_gives_its_grades_with_it(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        before, *given = (Grade(rollout_id="train-0.0.1", reward=0.5, source=source) for source in "abc")
        await pool.grade(before)
        assert await pool.end("train-0.0.1", End.COMPLETED, "done", [before, *given])
        attempt = await pool.rollout("train-0.0.1")
        assert (attempt.end, attempt.message, attempt.grades) == (End.COMPLETED, "done", (before, *given))
        assert [change.kind for change in await pool.changes(1)] == ["graded", "graded", "graded", "ended"]

    run(act)


@pytest.mark.parametrize(
    "refused",
    [{"reward": math.nan}, {"source": "a", "reward": 0.0}, {"source": "new", "reward": 0.0}, {"rollout_id": "train-0.1.1"}],
    ids=["no number", "another is stored", "another is given", "of another rollout"],
)
def test_end_one_of_whose_grades_is_rejected_is_not_given(run, refused: dict[str, Any]) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        grade = Grade(rollout_id="train-0.0.1", reward=1.0, source="a")
        await pool.grade(grade)
        position, new = await pool.position(), replace(grade, source="new")
        with pytest.raises(PoolError):
            await pool.end("train-0.0.1", End.COMPLETED, grades=[new, replace(grade, **refused)])
        attempt = await pool.rollout("train-0.0.1")
        assert (attempt.end, attempt.grades, await pool.position()) == (None, (grade,), position)
        assert await pool.end("train-0.0.1", End.COMPLETED, grades=[new])

    run(act)


def test_grades_that_come_with_a_second_end_are_refused(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        grade = Grade(rollout_id="train-0.0.1", reward=1.0, source="g")
        assert await pool.end("train-0.0.1", End.COMPLETED, grades=[grade])
        with pytest.raises(PoolError, match="late"):
            await pool.end("train-0.0.1", End.COMPLETED, grades=[grade])
        with pytest.raises(PoolError, match="rollout"):
            await pool.end("nobody", End.COMPLETED, grades=[replace(grade, rollout_id="nobody")])
        assert not await pool.end("train-0.0.1", End.TIMEOUT)

    run(act)


def test_thousands_of_rollouts_and_grades_are_stored(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, size=2100)
        grades = [Grade(rollout_id="train-0.7.1", reward=1.0, source="g", step=step) for step in range(2100)]
        assert await pool.end("train-0.7.1", End.COMPLETED, grades=grades)
        assert (await pool.rollout("train-0.7.1")).grades == tuple(grades)
        assert ((await pool.stats()).rollouts, len(await pool.rollout_refs("train-0"))) == (2100, 2100)
        assert len(await pool.changes(limit=9999)) == 2102

    run(act)


def test_many_ends_at_once_close_groups_whose_last_they_are(run) -> None:
    async def act(pool: Pool) -> None:
        for seq, (channel, min_size) in enumerate([("train", 0), ("train", 3), ("val", 3), ("train", 0)]):
            await pool.open_group(TASK, places(seq, 3, channel), seq=seq, min_size=min_size)
        ending = [rollout for seq in (0, 1, 3) for rollout in places(seq, 3)][:-1] + places(2, 3, "val")
        async with asyncio.TaskGroup() as tasks:
            for rollout in ending:
                tasks.create_task(pool.append(make_step(rollout.id, version=rollout.place), make_node(rollout.id)))
                grades = [Grade(rollout_id=rollout.id, reward=1.0, source="g")] * rollout.place
                end = End.TIMEOUT if rollout.id == "train-1.0.1" else End.COMPLETED
                tasks.create_task(pool.end(rollout.id, end, f"end of {rollout.id}", grades))
        stats = await pool.stats()
        assert (stats.groups_complete, stats.groups_short, stats.ends) == (3, 1, {"completed": 10, "timeout": 1})
        assert ids(await pool.unfinished("train")) == ["train-1", "train-3"]
        for rollout in ending:
            attempt = await pool.rollout(rollout.id)
            assert (attempt.message, len(attempt.grades)) == (f"end of {rollout.id}", min(rollout.place, 1))
        assert ids((await must_claim(pool)).groups) == ["train-0"]

    run(act)


def test_rejected_ends_do_not_affect_their_neighbours(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, size=8)
        grade, names = Grade(rollout_id="train-0.3.1", reward=1.0, source="g"), [rollout.id for rollout in places(0, 8)]
        await pool.end(names[0], End.LOST)
        await pool.grade(grade)
        given: dict[str, list[Grade]] = {name: [] for name in (*names, "nobody")} | {names[3]: [replace(grade, reward=0.0)]}

        async def end(name: str, grades: list[Grade]) -> bool | None:
            with suppress(PoolError):
                return await pool.end(name, End.COMPLETED, grades=grades)

        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(end(name, grades)) for name, grades in given.items()]
        assert [end.result() for end in ends] == [False, True, True, None, True, True, True, True, None]
        assert (await pool.stats()).ends == {"lost": 1, "completed": 6}

    run(act)


def test_only_grades_are_rejected_if_graded_before(run) -> None:
    """A forged grade neither stays next to the run's own nor takes its place; those that end in the same moment are not touched."""

    async def act(pool: Pool) -> None:
        await open_groups(pool, size=4)
        names = [rollout.id for rollout in places(0, 4)]
        grades = [Grade(rollout_id=name, reward=0.0, source="g") for name in names]
        await pool.grade(replace(grades[1], reward=1.0, source="forged"))
        await pool.grade(grades[2])  # the same as the run's own, but not given by it

        async def end(grade: Grade) -> str:
            try:
                return str(await pool.end(grade.rollout_id, End.COMPLETED, grades=[grade], only_grades=True))
            except PoolError as refused:
                return str(refused)

        reported = await asyncio.gather(*map(end, grades))
        assert [each if each == "True" else "graded already" in each for each in reported] == ["True", True, True, "True"]
        assert [(await pool.rollout(name)).end for name in names] == [End.COMPLETED, None, None, End.COMPLETED]
        assert await pool.end(names[1], End.GRADER_ERROR, "forged")

    run(act)
