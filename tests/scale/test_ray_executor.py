"""Agents on the workers of a real Ray: whichever has room takes the next, and one that dies takes nothing with it."""

import asyncio
import os
import shutil
import signal
from collections import Counter

import pytest
from ray_setup import AGENT, RaySetup

from penstock.config import RolloutSection
from penstock.errors import ConfigError
from penstock.records import End, Sampling, make_rollout
from penstock.scale import manager
from penstock.sdk.discovery import load_agent

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

LIMITS = RolloutSection(group_size=4)


def ends(groups):
    return Counter(attempt.end for group in groups for attempt in group.rollouts)


def test_rollouts_of_a_killed_worker_run_again_without_loss(tmp_path):
    setup = RaySetup(tmp_path, stall=True)

    async def main():
        async with setup.opened(LIMITS, workers=2) as (runner, pool):
            work = asyncio.create_task(setup.groups(setup.scheduler(setup.tasks("asks", "asks"), runner, pool), pool))
            await setup.engine.until_stalling(8)
            before, victim = setup.answered(), setup.pids()[0]
            os.kill(victim, signal.SIGKILL)
            lost = {name for name, note in before.items() if note["pid"] == victim}
            successors = {name.removesuffix(".1") + ".2" for name in lost}
            while len(setup.pids()) < 3 or not successors <= setup.answered().keys():  # their first answers
                await pool.wait(await pool.position(), timeout_s=0.1)
            setup.engine.release()
            groups = await work
            return before, lost, groups, {name: await pool.rollout(name) for name in before}

    before, lost, groups, attempts = asyncio.run(main())
    assert len(lost) == 4 and ends(groups) == {End.COMPLETED: 8}
    assert {a.ref.id.removesuffix(".2") + ".1" for g in groups for a in g.rollouts if a.ref.attempt == 2} == lost
    for name, attempt in attempts.items():
        assert attempt.end is (End.LOST if name in lost else End.COMPLETED)
        assert len(attempt.steps) >= before[name]["answered"]


def test_more_rollouts_than_places_wait_for_whichever_worker_has_room(tmp_path):
    setup = RaySetup(tmp_path, stall=True)

    async def main():
        async with setup.opened(RolloutSection(group_size=7), workers=2, concurrency=2) as (runner, pool):
            work = asyncio.create_task(setup.groups(setup.scheduler(setup.tasks("asks"), runner, pool), pool))
            await setup.engine.until_stalling(4)
            assert Counter(note["pid"] for note in setup.answered().values()) == dict.fromkeys(setup.pids(), 2)
            setup.engine.release()
            return await work

    assert ends(asyncio.run(main())) == {End.COMPLETED: 7}


def test_fewer_rows_than_workers_run_and_failing_one_fails_alone(tmp_path):
    setup = RaySetup(tmp_path)

    async def main():
        async with setup.opened(RolloutSection(group_size=1), workers=4) as (runner, pool):
            return await setup.groups(setup.scheduler(setup.tasks("asks", "raises", "asks"), runner, pool), pool)

    groups = asyncio.run(main())
    assert [ends([group]) for group in groups] == [{End.COMPLETED: 1}, {End.AGENT_ERROR: 1}, {End.COMPLETED: 1}]
    assert "workflow 'Noting': ValueError: this row fails (agent.py, line" in groups[1].rollouts[0].message


def test_cancellation_reaches_the_worker_before_it_continues(tmp_path):
    setup = RaySetup(tmp_path, stall=True)

    async def main():
        async with setup.opened(workers=1) as (runner, pool):
            (task,), rollout = setup.tasks("asks"), make_rollout("train-0", "t0", 0)
            await pool.open_group(task, [rollout], seq=0)
            work = asyncio.create_task(runner.run(rollout, task, Sampling(max_tokens=64)))
            await setup.engine.until_stalling(1)
            work.cancel()
            await asyncio.wait({work})
            return (await pool.rollout(rollout.id)).end

    assert asyncio.run(main()) is End.CANCELLED
    assert [path.name for path in setup.notes.glob("*.cancelled")] == ["train-0.0.1.cancelled"]


def test_blocking_agent_and_others_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "LATE_S", 0.5)
    setup, limits = RaySetup(tmp_path), RolloutSection(group_size=1, agent_timeout_s=8)

    async def main():
        async with setup.opened(limits, workers=1, grace_s=0.1) as (runner, pool):
            return await setup.groups(setup.scheduler(setup.tasks("blocks", "asks"), runner, pool), pool)

    blocked, other = asyncio.run(main())
    assert (blocked.rollouts[0].end, blocked.rollouts[0].ref.attempt) == (End.COMPLETED, 2)
    assert other.rollouts[0].end is End.COMPLETED


def test_agent_that_workers_cannot_load_is_refused_in_one_line(tmp_path):
    file = shutil.copy(AGENT, tmp_path / "gone.py")
    agent = load_agent(file, {}, {})
    file.unlink()

    async def main():
        async with RaySetup(tmp_path / "setup").opened(agent=agent, workers=2):
            pass

    with pytest.raises(ConfigError, match=r"gone\.py"):
        asyncio.run(main())
