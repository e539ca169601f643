"""RunnerPort the missing attempts of an evaluation: the pool records which have ended, and those are never run again."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from penstock.pool.base import Pool
from penstock.records import Attempt, End, Group, Rollout, Sampling, Task, make_rollout
from penstock.rollout.scheduler import LOST, RunnerPort, run_to_end

CHANNEL = "eval"
PAGE_GROUPS = 4
"""Groups in memory at once: larger pages are no faster, and groups of long agents are large."""
OPEN_BATCH = 100
"""Groups opened at once: they share one fsync."""
UNFINISHED = (None, End.CANCELLED, End.LOST)
"""Ends of attempts that an earlier process did not finish: they are made again."""
HEAD_START_S = 3.0
"""How long the first attempt of an evaluation may have the engine to itself: the user soon sees whether the agent works at all, and
the engine has cached the prompts' common prefix before the others start. With several processes it is the first of each, so that
what an agent loads on its first call is loaded once."""


class EvalRow(NamedTuple):
    """A task to evaluate, and its row in the dataset."""

    number: int
    task: Task


class PlannedAttempt(NamedTuple):
    """An attempt to run."""

    rollout: Rollout
    task: Task


class EvalPlan(NamedTuple):
    """The attempts to run."""

    attempts: list[PlannedAttempt]
    done: int
    """Attempts that have ended already."""


async def plan_attempts(rows: Sequence[EvalRow], pool: Pool, *, samples: int, retry_failed: bool = False) -> EvalPlan:
    """Open groups that do not exist, and replace attempts that were not finished or, with `retry_failed`, that failed."""
    again = {
        group.seq: [attempt.rollout for attempt in group.attempts if _needs_retry(attempt, retry_failed)]
        async for group in read_groups(pool)
    }
    planned: list[PlannedAttempt] = []
    for first in range(0, len(rows), OPEN_BATCH):
        async with asyncio.TaskGroup() as opening:
            given = [
                opening.create_task(_attempts_of(row, again.get(row.number), pool, samples=samples))
                for row in rows[first : first + OPEN_BATCH]
            ]
        planned += [place for each in given for place in each.result()]
    return EvalPlan(planned, len(rows) * samples - len(planned))


async def _attempts_of(row: EvalRow, again: Sequence[Rollout] | None, pool: Pool, *, samples: int) -> list[PlannedAttempt]:
    """Returns the attempts of one row: replacements of those in `again`, or all where its group does not exist (None)."""
    if again is not None:
        return [PlannedAttempt(await pool.replace(rollout, LOST), row.task) for rollout in again]
    rollouts = [make_rollout(f"{CHANNEL}-{row.number}", row.task.id, place, channel=CHANNEL) for place in range(samples)]
    await pool.open_group(row.task, rollouts, seq=row.number)
    return [PlannedAttempt(rollout, row.task) for rollout in rollouts]


async def run_attempts(
    planned: Sequence[PlannedAttempt],
    runner: RunnerPort,
    pool: Pool,
    *,
    sampling: Sampling,
    concurrency: int,
    retries: int,
    first_alone: int = 1,
    prefetch: int = 0,
) -> None:
    """Run each to its end, `concurrency` at once; one that is lost with its worker is made again.

    The first `first_alone` ones start before the others. `prefetch` ones wait with the runner, to be started without a round
    trip; there are none towards the end, as each can then start at once somewhere.
    """
    slots = asyncio.Semaphore(concurrency + prefetch)

    async def run(attempt: PlannedAttempt) -> None:
        try:
            await run_to_end(*attempt, runner, pool=pool, sampling=sampling, retries=retries)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as running:
        first: list[asyncio.Task[None]] = []
        for number, attempt in enumerate(planned):
            for _ in range(prefetch if number == max(0, len(planned) - concurrency) else 0):
                await slots.acquire()
            await slots.acquire()
            task = running.create_task(run(attempt))
            if len(first) < first_alone:
                first.append(task)
                if len(first) == first_alone:
                    await asyncio.wait(first, timeout=HEAD_START_S)


async def read_groups(pool: Pool) -> AsyncGenerator[Group]:
    """Yields all groups of the evaluation, by row; none is kept once the next one is asked for."""
    first = 0
    while page := await pool.groups(CHANNEL, first_seq=first, limit=PAGE_GROUPS):
        first = page[-1].seq + 1
        while page:
            yield page.pop(0)


def _needs_retry(attempt: Attempt, retry_failed: bool) -> bool:
    return attempt.end in UNFINISHED or (retry_failed and attempt.end is not End.COMPLETED)
