"""Compares the writes that killed processes reported as durable with what the pool holds."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise

from killable_process import KillableProcess
from pool_worker import wrong

from penstock.pool.base import Pool
from penstock.records import Group

PAGE = 50
IN_FLIGHT = 200
"""The most writes that can be durable but not yet reported when a process is killed."""


def kill_points(name: str, kills: int, lines: int) -> list[int]:
    """After how many lines to kill each process: random parts that sum to `lines`. The seed is printed."""
    seed = random.randrange(1 << 32)
    print(f"{name}: {kills} with seed {seed}")
    cuts = [0, *sorted(random.Random(seed).sample(range(1, lines), kills - 1)), lines]
    return [end - begin for begin, end in pairwise(cuts)]


@dataclass
class AcknowledgedWrites:
    """The lines that workers wrote; each names a write that must be in the pool."""

    said: Counter[str] = field(default_factory=Counter[str])
    lent: Counter[str] = field(default_factory=Counter[str])
    kills: int = 0
    _more: int = 0
    _enough: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, line: str) -> None:
        (self.lent if line.startswith("lent ") else self.said)[line] += 1
        self._more -= 1
        if self._more <= 0:
            self._enough.set()

    async def until(self, lines: int) -> None:
        """Wait until `lines` more lines were added."""
        self._more = lines
        self._enough.clear()
        await self._enough.wait()

    def count(self, kind: str) -> int:
        return sum(n for line, n in self.said.items() if line.startswith(f"{kind} "))

    async def run_until_killed(self, writers: KillableProcess, lines: int) -> None:
        """Start a worker and kill it after `lines` lines."""
        await writers.start()
        for _ in range(lines):
            self.add(await writers.read_line())
        for line in await writers.kill():
            self.add(line)
        self.kills += 1

    async def check(self, pool: Pool) -> None:
        """Each reported write is in the pool once; unreported ones only as many as were in flight at the kills."""
        there = Counter([line async for line in lines_of(pool)])
        lost, unsaid = self.said - there, there - self.said
        twice = [line for line, n in (self.said | there).items() if n > 1]
        kinds = ", ".join(f"{self.count(kind)} {kind}s" for kind in ("group", "step", "grade", "end"))
        print(f"{self.kills} kills; acknowledged {kinds}, {self.count('trained')} trained groups")
        print(f"lost {lost.total()}, twice {len(twice)}, durable but not said {unsaid.total()}")
        assert (lost, twice) == (Counter(), [])
        assert unsaid.total() <= max(self.kills, 1) * IN_FLIGHT


async def lines_of(pool: Pool) -> AsyncIterator[str]:
    """The pool's content as the lines a worker would write; asserts that the content is unchanged."""
    steps = 0
    async for group in all_groups(pool):
        assert wrong(group) == []
        yield f"group {group.id}"
        for attempt in group.rollouts:
            steps += len(attempt.steps)
            for step in attempt.steps:
                yield f"step {attempt.ref.id} {step.index}"
            for grade in attempt.grades:
                yield f"grade {grade.rollout_id}"
            if attempt.end:
                yield f"end {attempt.ref.id}"
    for group_id, _ in await pool.trained():
        yield f"trained {group_id}"
    assert (await pool.stats()).steps == steps


async def all_groups(pool: Pool) -> AsyncIterator[Group]:
    """Page by page."""
    first = 0
    while page := await pool.groups("train", first_seq=first, limit=PAGE):
        for group in page:
            yield group
        first = page[-1].seq + 1
