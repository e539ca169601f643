"""Rollouts per second of the whole rollout side (scheduler, runner, executor, gateway, pool on disk, grader), against its engine.

What they are held against, in the same run and the same process:
(a) the engine's own limit: its slots over its time for three calls; where that time is nothing, three calls one after the other
(b) a bare asyncio loop that awaits `engine.generate` three times for each rollout: no agent, no HTTP, nothing recorded, no grade
(c) the same agent on the same `openai` client, against a server in another process that answers alike after the same wait and
    does nothing else: what an agent costs before any of ours
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.scale_agents.three_calls import ASKS, CALLS, talk
from bench.scale_engine import SAID, SLOTS, TimedEngine
from penstock.config import RunConfig
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.pool.sqlite import SqlitePool
from penstock.records import Sampling, Task
from penstock.rollout.executors.base import read_section
from penstock.rollout.scheduler import Scheduler
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.sdk.clients import Clients
from penstock.sdk.discovery import open_agent
from penstock.sdk.routing import RolloutContext
from penstock.testing import write_tokenizer
from penstock.train.resources import LocalRollouts, open_rollouts

GROUP = 8
ENOUGH = 4096
"""Rollouts of an engine that takes no time, to be measured at all."""
AGENT = Path(__file__).parent / "scale_agents" / "three_calls.py"
TASK = Task(id="t", prompt=tuple(ASKS))
SAMPLING = Sampling(max_tokens=256)


class Speed(NamedTuple):
    """Of a number of rollouts, so many at once."""

    per_s: float
    cpu_ms: float
    """Processor time for each, of this process and of those that it started."""


class Cell(NamedTuple):
    """One size, ours and what it is held against; rollouts per second, and milliseconds of processor time for each."""

    at_once: int
    ours: Speed
    limit: float
    bare: Speed
    client: Speed


def config_of(folder: Path, *, executor: str, engine: str, slots: int, **section: Any) -> RunConfig:
    """A run whose agent makes three calls."""
    return RunConfig.model_validate(
        {
            "run": {"name": "scale", "folder": folder},
            "model": {"name": "scripted"},
            "agent": {"entry": AGENT},
            "dataset": {"train": folder / "unused.jsonl"},
            "rollout": {"executor": executor, "group_size": GROUP, "agent_timeout_s": 600, "grader_timeout_s": 600},
            "engine": {"name": f"bench.scale_engine:{engine}", "slots": slots},
            "gateway": {"rollout_calls_per_s": 1e9},
            "executor": section,
        }
    )


@asynccontextmanager
async def rollout_side(folder: Path, config: RunConfig) -> AsyncGenerator["Side", None]:
    """Opened as a training run opens it, on a SQLite pool."""
    path = folder / config.run.name
    path.mkdir(parents=True)
    model = write_tokenizer(folder / "model", corpus=[SAID * 40, str(ASKS) * 40], vocab_size=400)
    inputs = Inputs(
        tasks=[TASK],
        heldout=[],
        agent=open_agent(config.agent, config.workflow, config.grader),
        executor=read_section(config.rollout.executor, config.executor),
        model="scripted",
        folder=model,
    )
    pool, events = SqlitePool(path), Events()
    try:
        async with open_rollouts(config, inputs, RunFolder(path, resumed=False), events, pool) as rollouts:
            yield Side(config, rollouts, pool, events)
    finally:
        await pool.close()


class Side:
    """The rollout side, with its engine bare beside it."""

    def __init__(self, config: RunConfig, rollouts: LocalRollouts, pool: Pool, events: Events) -> None:
        self._config, self._rollouts, self._pool, self._events = config, rollouts, pool, events
        assert isinstance(rollouts.engine, TimedEngine)
        self.engine = rollouts.engine
        self._channels = count()
        self._left, self._all_ended = 0, asyncio.Event()
        events.listen(self._count)

    async def ours(self, total: int, at_once: int) -> Speed:
        """`total` rollouts, `at_once` of them at any time, from the first group's opening to the last rollout's end on disk."""
        limits = self._config.rollout.model_copy(update={"concurrency": at_once, "groups_per_step": total // GROUP})
        scheduler = Scheduler(
            [TASK],
            self._rollouts.runner,
            pool=self._pool,
            events=self._events,
            limits=limits,
            sampling=SAMPLING,
            seed=0,
            steps=1,
            channel=(channel := f"bench{next(self._channels)}"),
        )
        self._left = total
        self._all_ended.clear()

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(scheduler.run())
                await self._all_ended.wait()
                scheduler.stop()

        speed = await clock(run, total)
        stats = await self._pool.stats(channel)
        if stats.ends != {"completed": total} or stats.steps != CALLS * total:
            raise SystemExit(f"rollouts were lost: {stats}")
        return speed

    async def bare(self, total: int, at_once: int) -> Speed:
        """(b): the engine alone."""
        tokenizer = self.engine.tokenizer
        prompt = tokenizer.encode(str(ASKS))
        reply = list(self.engine.whole.ids)

        async def rollout() -> None:
            ids = list(prompt)
            for _ in range(CALLS):
                async with aclosing(self.engine.generate(ids, SAMPLING)) as chunks:
                    async for _chunk in chunks:
                        pass
                ids += reply + prompt

        return await clock(lambda: closed_loop(rollout, total, at_once), total)

    async def limit(self, at_once: int) -> float:
        """(a): rollouts per second that the engine can serve, whoever asks."""
        if wait_s := self.engine.wait_s:
            return min(at_once, self._config.engine.slots or SLOTS) / (CALLS * wait_s)
        return (await self.bare(ENOUGH, 1)).per_s

    def _count(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "rollout.end":
            self._left -= 1
            if not self._left:
                self._all_ended.set()


async def client_alone(url: str, wait_s: float, total: int, at_once: int) -> Speed:
    """(c): the agent on its client, against a server that does nothing else. The servers' processor time is not counted."""
    clients = Clients()

    async def rollout() -> None:
        client = RolloutContext(base_url=url, api_key="none", clients=clients).openai()
        await talk(client, list(ASKS), seed=int(wait_s * 1000) * 1000)

    try:
        return await clock(lambda: closed_loop(rollout, total, at_once), total, alone=True)
    finally:
        await clients.close()


async def closed_loop(rollout: Callable[[], Awaitable[None]], total: int, at_once: int) -> None:
    """`total` of them, `at_once` at any time."""
    left = iter(range(total))

    async def worker() -> None:
        for _ in left:
            await rollout()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, total)):
            group.create_task(worker())


async def clock(work: Callable[[], Awaitable[None]], total: int, *, alone: bool = False) -> Speed:
    """How fast `total` rollouts went; `alone` leaves other processes out."""
    start, before = time.perf_counter(), cpu_s(alone=alone)
    await work()
    seconds = time.perf_counter() - start
    return Speed(total / seconds, (cpu_s(alone=alone) - before) / total * 1e3)


def cpu_s(*, alone: bool) -> float:
    """Processor time so far, of this process and those under it."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *([] if alone else me.children(recursive=True))):
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def totals(at_once: int, *, quick: bool) -> int:
    """How many rollouts a size is measured with: two rounds of all at once, and enough of them to take a while."""
    return at_once if quick else max(2 * at_once, 256)


async def measure(side: Side, upstream: str, sizes: tuple[int, ...], *, quick: bool) -> list[Cell]:
    """Every size: ours between its neighbours, so that a ratio is of the same minute."""
    wait_s = side.engine.wait_s
    await side.ours(64, 64)  # first calls are slow, whoever makes them
    await client_alone(upstream, 0.0, 64, 64)
    cells: list[Cell] = []
    for at_once in sizes:
        total = totals(at_once, quick=quick)
        bare = await side.bare(total if wait_s else max(total, ENOUGH), at_once)
        ours = await side.ours(total, at_once)
        client = await client_alone(upstream, wait_s, total, at_once)
        cells.append(Cell(at_once, ours, await side.limit(at_once), bare, client))
    return cells
