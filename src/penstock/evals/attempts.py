"""Makes the attempts of an evaluation that are missing: the pool is the journal, so what has ended is never run again."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from penstock.pool.base import Pool
from penstock.records import Attempt, End, Group, Rollout, Sampling, Task, make_rollout
from penstock.rollout.scheduler import LOST, Runs, run_to_end

CHANNEL = "eval"
PAGE_GROUPS = 4
"""Groups in memory at once: more of them are read no faster, and those of long agents are large."""
OPEN_BATCH = 100
"""Groups opened at once: what is written together costs one wait for the disk."""
UNFINISHED = (None, End.CANCELLED, End.LOST)
"""Ends of attempts that another process began: they are made again."""
HEAD_START_S = 3.0
"""How long the first attempt of an evaluation may have the engine to itself: whoever watches sees soon whether the agent works at
all, and the engine has read what its prompts have in common once the others come. Where several processes make attempts, it is the
first of each: what an agent loads on its first call, it loads then."""


class EvalRow(NamedTuple):
    """A task to try, and its place in the dataset."""

    number: int
    task: Task


class PlannedAttempt(NamedTuple):
    """An attempt to make."""

    rollout: Rollout
    task: Task


class EvalPlan(NamedTuple):
    """What there is to do."""

    places: list[PlannedAttempt]
    done: int
    """Attempts that have ended already."""


async def plan_attempts(rows: Sequence[EvalRow], pool: Pool, *, samples: int, retry_failed: bool = False) -> EvalPlan:
    """Open what was never opened, give new attempts to what was begun and, if asked, to what failed."""
    again = {
        group.seq: [attempt.rollout for attempt in group.attempts if _needs_retry(attempt, retry_failed)]
        async for group in read_groups(pool)
    }
    places: list[PlannedAttempt] = []
    for first in range(0, len(rows), OPEN_BATCH):
        async with asyncio.TaskGroup() as opening:
            given = [
                opening.create_task(_attempts_of(row, again.get(row.number), pool, samples=samples))
                for row in rows[first : first + OPEN_BATCH]
            ]
        places += [place for each in given for place in each.result()]
    return EvalPlan(places, len(rows) * samples - len(places))


async def _attempts_of(row: EvalRow, again: Sequence[Rollout] | None, pool: Pool, *, samples: int) -> list[PlannedAttempt]:
    """What there is to do for one row: these `again`, or all of it where it was never opened."""
    if again is not None:
        return [PlannedAttempt(await pool.replace(rollout, LOST), row.task) for rollout in again]
    rollouts = [make_rollout(f"{CHANNEL}-{row.number}", row.task.id, place, channel=CHANNEL) for place in range(samples)]
    await pool.open_group(row.task, rollouts, seq=row.number)
    return [PlannedAttempt(rollout, row.task) for rollout in rollouts]


async def run_attempts(
    places: Sequence[PlannedAttempt],
    runner: Runs,
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

    async def run(place: PlannedAttempt) -> None:
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
                    await asyncio.wait(first, timeout=HEAD_START_S)


async def read_groups(pool: Pool) -> AsyncGenerator[Group]:
    """All groups of the evaluation, by row; none is kept once the next one is asked for."""
    first = 0
    while page := await pool.groups(CHANNEL, first_seq=first, limit=PAGE_GROUPS):
        first = page[-1].seq + 1
        while page:
            yield page.pop(0)


def _needs_retry(attempt: Attempt, retry_failed: bool) -> bool:
    return attempt.end in UNFINISHED or (retry_failed and attempt.end is not End.COMPLETED)
