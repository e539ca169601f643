"""An evaluation's attempts in several processes, as their parent sees them: each rollout goes to the one with the most room."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from penstock.config import RunConfig
from penstock.errors import ConfigError, PenstockError
from penstock.evals.child import Orders
from penstock.evals.presence import present
from penstock.evals.process import Child, ChildLost, start
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.pool.remote_writer import open_writer_process
from penstock.records import Attempt, End, Rollout, Sampling, Task
from penstock.rollout.guests import leaves
from penstock.sdk.discovery import Agent
from penstock.sdk.elsewhere import Recipe
from penstock.train.folder import RunFolder
from penstock.train.inputs import Inputs

IN_A_ROW = 5
"""Processes that may die in one place, each before it brought a rollout to its end, until the evaluation is given up."""
LONG_S, BUSY = 10.0, 0.85
"""An evaluation that is worth advice: it takes as long, and computes as large a part of the time."""


def check_processes(config: RunConfig) -> None:
    """ConfigError where the settings are of one process; needs nothing but them."""
    count = config.eval.processes
    if count == 1:
        return
    if config.engine.name == "embedded":
        remedy = "name one that is asked over HTTP, such as vllm or openai, or leave eval.processes at 1"
        raise ConfigError(f"eval.processes = {count}: the embedded engine has its weights in one process; {remedy}")
    if config.gateway.port:
        raise ConfigError(
            f"eval.processes = {count}: each needs a port, and gateway.port = {config.gateway.port} is one; set it to 0"
        )
    if config.rollout.executor in ("ray", "server"):
        text = f"rollout.executor = {config.rollout.executor!r} runs agents elsewhere already; leave eval.processes at 1"
        raise ConfigError(f"eval.processes = {count}: {text}")


def check_limits(config: RunConfig, agent: Agent) -> None:
    """ConfigError where the author limits what runs at once, which each process would count by itself."""
    for name, own in (("workflow", agent.workflow_config), ("grader", agent.grader_config)):
        if config.eval.processes > 1 and own is not None and own.concurrency.max_concurrent is not None:
            text = f"the {name}'s concurrency.max_concurrent = {own.concurrency.max_concurrent} would hold for each of them"
            raise ConfigError(f"eval.processes = {config.eval.processes}: {text}; leave one of the two out")


def advice(config: RunConfig, agent: Agent, *, busy_s: float, seconds: float) -> str:
    """What to say of an evaluation that one process made in so many seconds, of which it computed `busy_s`; mostly nothing."""
    cores = min(os.cpu_count() or 1, config.rollout.concurrency)
    if cores == 1 or seconds < LONG_S or busy_s < BUSY * seconds:
        return ""
    several = config.model_copy(update={"eval": config.eval.model_copy(update={"processes": cores})})
    try:
        check_processes(several)
        check_limits(several, agent)
    except ConfigError:
        return ""
    return f"the engine waited for this process, which was always busy; with `--processes {cores}` it would be faster"


class Place:
    """Room for one process, and for its successor where it dies."""

    def __init__(self, orders: Orders, events: Events) -> None:
        self.child: Child | None = None
        self._orders, self._events = orders, events
        self._lock = asyncio.Lock()
        self._died = 0
        """How many in a row, without an end of a rollout between."""

    @property
    def room(self) -> tuple[bool, int]:
        """The least of these has the most."""
        if self.child is None or self.child.is_over:
            return True, 0
        return False, len(self.child.running) - self._orders.at_once

    async def living(self) -> Child:
        """The process that is here, or a new one; PenstockError where that would die like those before it."""
        async with self._lock:
            if self.child is None or self.child.is_over:
                self._count(self.child)
                self.child = await start(self._orders, self._events)
            return self.child

    def _count(self, dead: Child | None) -> None:
        if dead is None:
            return
        self._died = 0 if dead.ended else self._died + 1
        if self._died > IN_A_ROW:
            text = f"{self._died} processes in a row died before a rollout ended, the last one {dead.fate}"
            raise PenstockError(f"{text}; look into {dead.log}, then the same command goes on")
        self._events.emit("stage", text=f"process {self._orders.number} {dead.fate}; what it ran is made again by another")

    async def close(self) -> None:
        """End the process that is here."""
        if self.child is not None:
            await self.child.close()


class Processes:
    """Stands for the runners of several processes; see `Runner`."""

    def __init__(self, places: list[Place], events: Events, pool: Pool) -> None:
        self._places, self._events, self._pool = places, events, pool

    async def run(self, rollout: Rollout, task: Task, sampling: Sampling) -> End | None:
        """See `Runner.run`. WorkerLost comes once another process is there to take the next attempt."""
        place = min(self._places, key=lambda place: place.room)
        child = await place.living()
        started = asyncio.get_running_loop().time()
        try:
            return await child.run(rollout, task, sampling)
        except ChildLost as lost:
            attempt = await self._pool.attempt(rollout.id)  # it may have ended, and its process died before it answered
            if lost.half_told:
                self._tell(attempt, str(lost), asyncio.get_running_loop().time() - started)
            if attempt.end is not None:
                return attempt.end
            await place.living()
            raise

    def _tell(self, attempt: Attempt, reason: str, seconds: float) -> None:
        """What a process that died could not tell any more."""
        rollout = attempt.rollout
        self._events.emit(
            "rollout.end",
            rollout_id=rollout.id,
            group_id=rollout.group_id,
            channel=rollout.channel,
            end=attempt.end or End.LOST,
            message=attempt.message if attempt.end else reason,
            reward=attempt.reward,
            seconds=round(seconds, 3),
        )


@asynccontextmanager
async def open_processes(
    config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events, pool: Pool, *, count: int
) -> AsyncGenerator[Processes]:
    """Start `count` of them, each with an engine, a gateway and a runner of its own; leaving ends them and undoes what they run."""
    folder.secret()  # made once, and not by several at the same time
    async with _scribe(config, folder) as scribe:
        orders = Orders(
            config=config.model_dump(mode="json"),
            recipe=Recipe.of(inputs.agent).write().decode(),
            model=inputs.model,
            model_folder=str(inputs.folder),
            run_folder=str(folder.path),
            scribe=scribe,
        )
        shares = [config.rollout.concurrency // count + (number < config.rollout.concurrency % count) for number in range(count)]
        places = [Place(replace(orders, number=number, at_once=share), events) for number, share in enumerate(shares)]
        try:
            await _start_all(places)
            yield Processes(places, events, pool)
        finally:
            async with asyncio.TaskGroup() as closing:
                for place in places:
                    closing.create_task(place.close())


def spare_of(concurrency: int, count: int) -> int:
    """Rollouts that wait in `count` processes: as many as end there while the next ones are on their way."""
    return 0 if count == 1 else count * max(1, concurrency // count // 4)


@asynccontextmanager
async def _scribe(config: RunConfig, folder: RunFolder) -> AsyncGenerator[str]:
    """One that writes for all, where they would wait for each other's turn at a file; nobody where a server takes their writes."""
    if config.pool.name != "sqlite":
        yield ""
        return
    with present(folder.path) as presence:
        async with open_writer_process(folder.path, keeps=[presence]) as address:
            yield address


async def _start_all(places: list[Place]) -> None:
    try:
        async with asyncio.TaskGroup() as starting:
            for place in places:
                starting.create_task(place.living())
    except ExceptionGroup as group:  # they have one reason, most likely
        raise next(leaves(group)) from None
