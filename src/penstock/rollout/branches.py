"""Branches of recorded rollouts: which steps to branch from, and the rollouts that continue from each of them."""

import asyncio
from collections.abc import Sequence

from penstock.config import RolloutSection
from penstock.pool.base import AFTER_ALL, Pool
from penstock.records import BranchPoint, End, Rollout, RolloutRef, Sampling, Task, make_rollout
from penstock.rollout.scheduler import LOST, RunnerPort, run_to_end

CHANNEL = "branch"
UNFINISHED = (None, End.CANCELLED, End.LOST)
"""Ends of branches that an earlier process did not finish: they are made again."""


def calls_of(attempt: Rollout) -> list[int]:
    """Returns the first step of each call of a rollout, in order: the choices of one call share what came before it."""
    first = dict[str, int]()
    for step in sorted(attempt.steps, key=lambda step: step.index):
        first.setdefault(step.answer or f"step-{step.index}", step.index)
    return list(first.values())


def spread_calls(attempt: Rollout, most: int) -> list[int]:
    """Returns up to `most` calls of a rollout, spread evenly, without the first: before it, all attempts at a task are equal."""
    later = calls_of(attempt)[1:]
    return later if len(later) <= most else [later[number * len(later) // most] for number in range(most)]


def branch_group(point: BranchPoint) -> str:
    return f"{point.rollout_id}.step{point.step}"


async def run_branches(
    points: Sequence[BranchPoint], runner: RunnerPort, *, pool: Pool, sampling: Sampling, limits: RolloutSection
) -> list[str]:
    """Makes `limits.branches` continuations from each point; returns the ids of their rollouts, those of a point together.

    Those that have ended already are not made again, so a killed process resumes here. The recorded rollouts are in
    the same pool.
    """
    slots, made = asyncio.Semaphore(limits.concurrency), list[list[str]]()

    async def run(rollout: RolloutRef, task: Task, names: list[str], place: int) -> None:
        async with slots:
            last = await run_to_end(rollout, task, runner, pool=pool, sampling=sampling, retries=limits.retries)
            names[place] = last.id

    async with asyncio.TaskGroup() as running:
        for point in points:
            task, rollouts = await pool.task(point.rollout_id), await _open(point, pool, limits.branches)
            made.append([rollout.id for rollout in rollouts])
            for place, rollout in enumerate(rollouts):
                if (await read_end(pool, rollout.id)).end is None:
                    running.create_task(run(rollout, task, made[-1], place))
    return [name for names in made for name in names]


async def read_end(pool: Pool, rollout_id: str) -> Rollout:
    """Returns an attempt without its steps and nodes."""
    return await pool.rollout(rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)


async def _open(point: BranchPoint, pool: Pool, count: int) -> list[RolloutRef]:
    """Opens the group of a point, and replaces what an earlier process did not finish; returns the last attempt at each place."""
    name, task = branch_group(point), await pool.task(point.rollout_id)
    fresh = [make_rollout(name, task.id, place, channel=CHANNEL, branch=point) for place in range(count)]
    if not (known := await pool.rollout_refs(name)):
        await pool.open_group(task, fresh, seq=None)
        return fresh
    latest = {rollout.place: rollout for rollout in known}  # they are sorted by attempt
    for place, rollout in latest.items():
        if (await read_end(pool, rollout.id)).end in UNFINISHED:
            latest[place] = await pool.replace(rollout, LOST)
    return [latest[place] for place in sorted(latest)]
