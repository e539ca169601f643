"""Makes the attempts of an evaluation that are missing: the pool is the journal, so what has ended is never run again."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from penstock.pool.base import Pool
from penstock.records import Attempt, End, Group, Rollout, Sampling, Task, make_rollout
from penstock.rollout.scheduler import LOST, RunnerPort, run_to_end

CHANNEL = "eval"
READ = 4
"""Groups in memory at once: more of them are read no faster, and those of long agents are large."""
OPENED = 100
"""Groups opened at once: what is written together costs one wait for the disk."""
UNDONE = (None, End.CANCELLED, End.LOST)
"""Ends of attempts that another process began: they are made again."""
AHEAD_S = 3.0
"""How long the first attempt of an evaluation may have the engine to itself: whoever watches sees soon whether the agent works at
all, and the engine has read what its prompts have in common once the others come. Where several processes make attempts, it is the
first of each: what an agent loads on its first call, it loads then."""


class EvalRow(NamedTuple):
    """A task to try, and its place in the dataset."""

    number: int
    task: Task


class Place(NamedTuple):
    """An attempt to make."""

    rollout: Rollout
    task: Task


class Plan(NamedTuple):
    """What there is to do."""

    places: list[Place]
    done: int
    """Attempts that have ended already."""


async def plan(rows: Sequence[EvalRow], pool: Pool, *, samples: int, retry_failed: bool = False) -> Plan:
    """Open what was never opened, give new attempts to what was begun and, if asked, to what failed."""
    again = {
        group.seq: [attempt.rollout for attempt in group.attempts if _again(attempt, retry_failed)] async for group in stored(pool)
    }
    places: list[Place] = []
    for first in range(0, len(rows), OPENED):
        async with asyncio.TaskGroup() as opening:
            given = [
                opening.create_task(_places(row, again.get(row.number), pool, samples=samples))
                for row in rows[first : first + OPENED]
            ]
        places += [place for each in given for place in each.result()]
    return Plan(places, len(rows) * samples - len(places))


async def _places(row: EvalRow, again: Sequence[Rollout] | None, pool: Pool, *, samples: int) -> list[Place]:
    """What there is to do for one row: these `again`, or all of it where it was never opened."""
    if again is not None:
        return [Place(await pool.replace(rollout, LOST), row.task) for rollout in again]
    rollouts = [make_rollout(f"{CHANNEL}-{row.number}", row.task.id, place, channel=CHANNEL) for place in range(samples)]
    await pool.open_group(row.task, rollouts, seq=row.number)
    return [Place(rollout, row.task) for rollout in rollouts]


async def make(
    places: Sequence[Place],
    runner: RunnerPort,
    pool: Pool,
    *,
    sampling: Sampling,
    concurrency: int,
    retries: int,
    ahead: int = 1,
    spare: int = 0,
) -> None:
    """Run each to its end, so many at once; one that is lost with its worker is made again. Cancelled, what runs is undone.

    The first ones, as many as `ahead`, go ahead of the others. `spare` ones wait with the runner, who starts them without asking;
    towards the end there are none, as each may then begin at once somewhere.
    """
    slots = asyncio.Semaphore(concurrency + spare)

    async def run(place: Place) -> None:
        try:
            await run_to_end(*place, runner, pool=pool, sampling=sampling, retries=retries)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as running:
        first: list[asyncio.Task[None]] = []
        for number, place in enumerate(places):
            for _ in range(spare if number == max(0, len(places) - concurrency) else 0):
                await slots.acquire()
            await slots.acquire()
            task = running.create_task(run(place))
            if len(first) < ahead:
                first.append(task)
                if len(first) == ahead:
                    await asyncio.wait(first, timeout=AHEAD_S)


async def stored(pool: Pool) -> AsyncGenerator[Group]:
    """All groups of the evaluation, by row; none is kept once the next one is asked for."""
    first = 0
    while page := await pool.groups(CHANNEL, first_seq=first, limit=READ):
        first = page[-1].seq + 1
        while page:
            yield page.pop(0)


def _again(attempt: Attempt, retry_failed: bool) -> bool:
    return attempt.end in UNDONE or (retry_failed and attempt.end is not End.COMPLETED)
