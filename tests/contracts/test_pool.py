"""The contract of `penstock.pool.base` over every pool in the table: what is written, and how a lost rollout is replaced."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pool_cases import KINDS, TASK, claim, complete, finish, ids, make_node, make_step, must_claim, open_groups, places, play

from penstock.errors import PoolError
from penstock.pool.base import Pool
from penstock.records import End, Grade, Node, RolloutRef, Step, make_rollout


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Run an act on a new pool of each kind."""
    return partial(play, request.param, tmp_path)


# what is written is what is read


def test_everything_recorded_of_a_rollout_comes_back(run) -> None:
    first, second = (
        make_step("train-0.0.1"),
        make_step("train-0.0.1", 1, policy="planner", full_logprobs=None, completion_ids=(), logprobs=(), versions=()),
    )
    root, later = make_node("train-0.0.1", tools=({"name": "mul"},)), make_node("train-0.0.1", 1, parent=0, reason="edited")
    grade = Grade(rollout_id="train-0.0.1", reward=0.5, source="g", transcript="main", step=1)

    async def act(pool: Pool) -> None:
        await open_groups(pool)
        await pool.append(first, root)
        await pool.append(second, later)
        await pool.grade(grade)
        await pool.end("train-0.0.1", End.TIMEOUT, "too slow")
        attempt = await pool.rollout("train-0.0.1")
        assert (attempt.ref, attempt.end, attempt.message) == (places(0)[0], End.TIMEOUT, "too slow")
        assert (attempt.nodes, attempt.steps, attempt.grades) == ((root, later), (first, second), (grade,))

    run(act)


def test_groups_are_listed_by_number_with_the_attempts_that_count(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, 4)
        await pool.open_group(TASK, places(1, channel="val"), seq=1)
        groups = await pool.groups("train", first_seq=1, limit=2)
        assert ids(groups) == ["train-1", "train-2"]
        assert (groups[0].seq, groups[0].task, groups[0].channel) == (1, TASK, "train")
        assert [attempt.ref for attempt in groups[0].rollouts] == places(1)
        assert ids(await pool.groups("val")) == ["val-1"]

    run(act)


def test_a_group_that_exists_is_left_as_it_is(run) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0)
        await open_groups(pool, size=5)
        (group,) = await pool.groups("train")
        assert len(group.rewards) == 2

    run(act)


@pytest.mark.parametrize(
    "rollouts",
    [
        [],
        [places(0)[0], places(0)[0]],
        [places(0)[0], places(1)[1]],
        [places(0)[0], replace(places(0)[1], channel="val")],
        [replace(places(0)[0], task_id="other")],
        [replace(places(3)[0], id="train-9.0.1")],
    ],
)
def test_rollouts_that_make_no_group_are_refused(run, rollouts: list[RolloutRef]) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, first=9)
        with pytest.raises(PoolError):
            await pool.open_group(TASK, rollouts, seq=0)
        assert ids(await pool.groups("train")) == ["train-9"]
        assert (await pool.stats()).rollouts == 2

    run(act)


def test_repeating_an_append_is_harmless(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        step, node = make_step("train-0.0.1", logprobs=(-0.1, -0.2, -0.3)), make_node("train-0.0.1")
        for given in (node, node, None):
            await pool.append(step, given)
        stats = await pool.stats()
        assert (stats.steps, stats.tokens, stats.prompt_tokens) == (1, 3, 3)

    run(act)


@pytest.mark.parametrize(
    ("step", "node"),
    [
        (make_step("train-0.0.1", completion_ids=(7, 8, 0)), None),
        (make_step("train-0.0.1", message={"role": "assistant", "content": "43"}), None),
        (make_step("train-0.0.1", full_logprobs=None), None),
        (make_step("train-0.0.1", 1, node=0), make_node("train-0.0.1", token_ids=(1, 2))),
    ],
    ids=["other tokens", "other message", "no full logprobs", "other node"],
)
def test_other_content_under_the_same_id_is_refused(run, step: Step, node: Node | None) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        await pool.append(make_step("train-0.0.1"), make_node("train-0.0.1"))
        with pytest.raises(PoolError, match="stays"):
            await pool.append(step, node)
        assert (await pool.rollout("train-0.0.1")).steps == (make_step("train-0.0.1"),)

    run(act)


@pytest.mark.parametrize(
    ("step", "node"),
    [
        (make_step("train-0.0.1"), None),
        (make_step("train-0.0.1"), make_node("train-0.0.1", parent=4)),
        (make_step("train-0.0.1"), make_node("train-0.0.1", 5)),
        (make_step("train-0.0.1"), make_node("train-0.1.1")),
        (make_step("train-0.0.1", versions=(1,)), make_node("train-0.0.1")),
        (make_step("train-0.0.1", logprobs=()), make_node("train-0.0.1")),
        (make_step("train-0.0.1", full_logprobs=(0.0,)), make_node("train-0.0.1")),
        (make_step("train-0.0.1", logprobs=(math.nan, 0.0, 0.0)), make_node("train-0.0.1")),
        (make_step("train-0.0.1", completion_ids=(1, 2, 2**40)), make_node("train-0.0.1")),
        (make_step("nobody"), make_node("nobody")),
    ],
    ids=["no node", "no parent", "wrong node", "foreign node", "versions", "logprobs", "full", "nan", "huge id", "unknown rollout"],
)
def test_a_step_that_could_not_be_trained_is_refused_whole(run, step: Step, node: Node | None) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        with pytest.raises(PoolError):
            await pool.append(step, node)
        attempt, stats = await pool.rollout("train-0.0.1"), await pool.stats()
        assert (attempt.nodes, attempt.steps, stats.prompt_tokens, stats.breaks) == ((), (), 0, {})

    run(act)


@pytest.mark.parametrize("text", ["\ud800", "a\0b", "\udfff tail", "𝄞 \x1b[0m", "\x00" * 300])
def test_hostile_text_is_kept_exactly_or_refused(run, text: str) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        step = make_step("train-0.0.1", message={"role": "assistant", "content": text, text: [text]})
        try:
            await pool.append(step, make_node("train-0.0.1", messages_digest=text))
        except PoolError:
            assert (await pool.rollout("train-0.0.1")).steps == ()
        else:
            assert (await pool.rollout("train-0.0.1")).steps == (step,)

    run(act)


@pytest.mark.parametrize("content", [{"deep": math.nan}, {1: 2}, {"n": 2**70}, {"b": b"raw"}, [[[[math.inf]]]]])
def test_a_message_that_json_would_change_is_refused(run, content: Any) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        with pytest.raises(PoolError, match=r"train-0\.0\.1"):
            await pool.append(make_step("train-0.0.1", message={"role": "assistant", "content": content}), make_node("train-0.0.1"))

    run(act)


def test_a_message_nested_beyond_all_bounds_is_refused(run) -> None:
    content: Any = "x"
    for _ in range(5000):
        content = [content]

    async def act(pool: Pool) -> None:
        await open_groups(pool)
        with pytest.raises(PoolError):
            await pool.append(make_step("train-0.0.1", message={"content": content}), make_node("train-0.0.1"))
        await finish(pool, places(0)[0])

    run(act)


def test_hostile_ids_are_unknown_or_refused(run) -> None:
    async def act(pool: Pool) -> None:
        with pytest.raises(PoolError):
            await pool.rollout("\ud800")
        with pytest.raises(PoolError):
            await pool.end("\ud800", End.CANCELLED)
        with pytest.raises(PoolError):
            await pool.open_group(TASK, [make_rollout("\ud800", TASK.id, 0)], seq=0)
        await open_groups(pool)

    run(act)


# a lost rollout is replaced


def test_a_lost_rollout_is_replaced_and_fenced_off(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        lost, other = places(0)
        await pool.append(make_step(lost.id, version=-5), make_node(lost.id))
        successor = await pool.replace(lost, "worker died")
        assert successor == lost.successor
        with pytest.raises(PoolError, match="late"):
            await pool.append(make_step(lost.id, 1), make_node(lost.id, 1, parent=0))
        assert not await pool.end(lost.id, End.COMPLETED)
        await finish(pool, other)
        assert await claim(pool) is None
        await finish(pool, successor)
        lease = await must_claim(pool, max_staleness=0)
        assert [attempt.ref for attempt in lease.groups[0].rollouts] == [successor, other]
        assert ((await pool.rollout(lost.id)).end, (await pool.rollout(lost.id)).message) == (End.LOST, "worker died")

    run(act)


def test_replacing_twice_opens_one_successor(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        lost = places(0)[0]
        assert await pool.replace(lost, "a") == await pool.replace(lost, "b")
        third = await pool.replace(lost.successor, "c")
        assert third.attempt == 3
        assert await pool.replace(lost, "d") == lost.successor
        assert ((await pool.stats()).rollouts, (await pool.stats()).ends) == (4, {"lost": 2})

    run(act)


def test_replacing_failed_rollout_keeps_its_end_and_reopens_group(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, size=1)
        failed = places(0)[0]
        await pool.end(failed.id, End.ENGINE_ERROR)
        await pool.replace(failed, "try again")
        assert (await pool.rollout(failed.id)).end is End.ENGINE_ERROR
        assert await claim(pool) is None
        assert ids(await pool.unfinished("train")) == ["train-0"]
        assert (await pool.stats()).groups_complete == 0

    run(act)


def test_what_a_trainer_may_have_seen_is_not_replaced(run) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        done, failed = places(0)
        await finish(pool, done)
        with pytest.raises(PoolError, match="completed"):
            await pool.replace(done, "again")
        await pool.end(failed.id, End.TIMEOUT)
        lease = await must_claim(pool)
        for _ in range(2):
            with pytest.raises(PoolError, match="lent"):
                await pool.replace(failed, "again")
            await pool.release(lease.id)
        with pytest.raises(PoolError, match="rollout"):
            await pool.replace(make_rollout("x", TASK.id, 0), "who?")
        with pytest.raises(PoolError):
            await pool.replace(replace(failed, task_id="other"), "not the one stored")

    run(act)
