"""One process that makes attempts of an evaluation, as its parent sees it: asked by lines to its stdin, heard by its stdout."""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import orjson

from penstock.codec import to_json
from penstock.config import RunConfig
from penstock.errors import ConfigError, EngineError, GraderError, PenstockError, PoolError, PoolFailed, WorkerLost
from penstock.evals.worker_process import EXIT_S, EvalRolloutRequest, WorkerCommand, WorkerSetup, process_lock
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.pool.remote_writer import open_writer_process
from penstock.records import Attempt, End, Rollout, Sampling, Task
from penstock.rollout.author_tasks import leaves
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.sdk.agent_spec import AgentSpec, command
from penstock.sdk.discovery import Agent
from penstock.system.process_group import how_ended

ERRORS = {kind.__name__: kind for kind in (ConfigError, EngineError, GraderError, PoolError, PoolFailed, WorkerLost)}
"""What a rollout may raise, by name; anything else is a PenstockError here."""
DRAIN_S = 1.0
"""How long what a dead process has said may be on its way, where something that it started holds its stdout open."""
KILL_S = 5.0
"""For the system to end a process that was killed."""


class ProcessLost(WorkerLost):
    """The process died with the rollout; `half_told` says whether its start was heard of, and its end was not."""

    def __init__(self, message: str, *, half_told: bool) -> None:
        super().__init__(message)
        self.half_told = half_told


@dataclass(slots=True)
class _RunningRollout:
    done: asyncio.Future[End | None]
    answered: bool = False
    half_told: bool = False
    """Whether its `rollout.start` was heard, and its `rollout.end` was not."""


class EvalProcess(asyncio.SubprocessProtocol):
    """`start` makes one. Its events are told here as they come."""

    def __init__(self, number: int, log: Path, events: Events) -> None:
        loop = asyncio.get_running_loop()
        self.log = log
        """What it says on stderr."""
        self.running: dict[str, _RunningRollout] = {}
        self.ended = 0
        """Rollouts that it brought to an end."""
        self.fate = ""
        """How it ended."""
        self.ready: asyncio.Future[None] = loop.create_future()
        self._number, self._events, self._loop = number, events, loop
        self._over: asyncio.Future[None] = loop.create_future()
        self._said_before = log.stat().st_size
        self._rest = b""
        self._orders: list[bytes] = []
        self._mute = self._exited = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.done()

    async def run(self, rollout: Rollout, task: Task, sampling: Sampling) -> End | None:
        """See `Runner.run`; ChildLost where the process dies."""
        running = self.running[rollout.id] = _RunningRollout(self._loop.create_future())
        try:
            self.order(to_json(WorkerCommand(ask=EvalRolloutRequest(rollout=rollout, task=task, sampling=sampling))))
            return await running.done
        except asyncio.CancelledError:
            if not running.answered and not self.is_over:
                await self._undo(rollout.id, running)
            raise
        finally:
            del self.running[rollout.id]

    async def _undo(self, rollout_id: str, running: _RunningRollout) -> None:
        """Have it ended as CANCELLED; a process that is stuck leaves that to whoever goes on with the evaluation."""
        running.done = self._loop.create_future()
        self.order(to_json(WorkerCommand(cancel=rollout_id)))
        await asyncio.wait({running.done}, timeout=EXIT_S)
        if running.done.done():
            running.done.exception()  # it is the cancellation that goes on

    def order(self, line: bytes) -> None:
        """Send a line; those of one turn of the loop go together."""
        if not self._orders:
            self._loop.call_soon(self._flush)
        self._orders.append(line)

    def _flush(self) -> None:
        orders, self._orders = self._orders, []
        if not self._exited and not self._stdin.is_closing():
            self._stdin.write(b"\n".join([*orders, b""]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self._stdin = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                self._hear(orjson.loads(line))
            except Exception as error:  # a full disk, a listener's mistake: whoever waits here must learn of it
                self._fail(error)

    def _hear(self, told: dict[str, Any]) -> None:
        if kind := told.get("event"):
            fields: dict[str, Any] = told["fields"]
            if kind in ("rollout.start", "rollout.end") and (running := self.running.get(fields["rollout_id"])):
                running.half_told = kind == "rollout.start"
            self._events.emit(kind, **fields)
        elif rollout_id := told.get("over"):
            self._answer(rollout_id, told)
        elif told.get("ready"):
            self.ready.set_result(None)
        else:
            self.ready.set_exception((ConfigError if told["bad_input"] else EngineError)(told["refused"]))

    def _answer(self, rollout_id: str, told: dict[str, Any]) -> None:
        running = self.running.get(rollout_id)
        if running is None:
            return
        running.answered = True
        self.ended += "end" in told
        if running.done.done():
            return
        if "end" in told:
            running.done.set_result(End(told["end"]) if told["end"] else None)
        else:
            kind = ERRORS.get(told["error"], PenstockError)
            running.done.set_exception(kind(told["message"]))

    def _fail(self, error: Exception) -> None:
        for waits in (self.ready, *(running.done for running in self.running.values())):
            if not waits.done():
                waits.set_exception(error)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._mute = self._mute or fd == 1
        if self._mute and self._exited:
            self._end()

    def process_exited(self) -> None:
        self._exited = True
        if self._mute:
            self._end()
        else:
            self._loop.call_later(DRAIN_S, self._end)

    def _end(self) -> None:
        """Tell whoever waits that it is no more."""
        if self.is_over:
            return
        self.fate = how_ended(self._transport.get_returncode() or 0)
        self._transport.close()
        self._over.set_result(None)
        if not self.ready.done():
            self.ready.set_exception(EngineError(f"process {self._number} {self.fate} as it started{self._last_line()}"))
        for running in self.running.values():
            if not running.done.done():
                text = f"process {self._number} of the evaluation {self.fate}"
                running.done.set_exception(ProcessLost(text, half_told=running.half_told))

    def _last_line(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._said_before)
            lines = file.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {said} (more in {self.log})" if said else ""

    async def close(self, *, grace_s: float = EXIT_S) -> None:
        """Have it undo what it runs and end; past `grace_s`, or cancelled, it is killed with all that it started."""
        self._stdin.close()
        try:
            await asyncio.wait({self._over}, timeout=grace_s)
        finally:
            if not self._exited:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._transport.get_pid(), signal.SIGKILL)
            await asyncio.wait({self._over}, timeout=KILL_S)
            with suppress(FileNotFoundError):
                if self.is_over and not self.log.stat().st_size:
                    self.log.unlink()


async def start_process(orders: WorkerSetup, events: Events) -> EvalProcess:
    """A new process, ready for rollouts; ConfigError or EngineError says why it is not. Its death ends the wait for it."""
    log = Path(orders.run_folder) / f"process-{orders.number}.log"
    with log.open("ab") as said:
        child = EvalProcess(orders.number, log, events)
        await asyncio.get_running_loop().subprocess_exec(
            lambda: child, *command("penstock.evals.worker_process"), stdin=PIPE, stdout=PIPE, stderr=said, start_new_session=True
        )
    child.order(to_json(orders))
    try:
        await child.ready
    except BaseException:
        await child.close(grace_s=0.0)  # it runs nothing
        raise
    return child


MAX_DEATHS = 5
"""Processes that may die in one place, each before it brought a rollout to its end, until the evaluation is given up."""
LONG_S, BUSY = 10.0, 0.85
"""An evaluation that is worth advice: it takes as long, and computes as large a part of the time."""


def check_processes(config: RunConfig) -> None:
    """ConfigError where the settings are of one process; needs nothing but them."""
    count = config.eval.processes
    if count == 1:
        return
    if config.engine.in_process:
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


def processes_hint(config: RunConfig, agent: Agent, *, busy_s: float, seconds: float) -> str:
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


class ProcessSlot:
    """Room for one process, and for its successor where it dies."""

    def __init__(self, orders: WorkerSetup, events: Events) -> None:
        self.child: EvalProcess | None = None
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

    async def living(self) -> EvalProcess:
        """The process that is here, or a new one; PenstockError where that would die like those before it."""
        async with self._lock:
            if self.child is None or self.child.is_over:
                self._count(self.child)
                self.child = await start_process(self._orders, self._events)
            return self.child

    def _count(self, dead: EvalProcess | None) -> None:
        if dead is None:
            return
        self._died = 0 if dead.ended else self._died + 1
        if self._died > MAX_DEATHS:
            text = f"{self._died} processes in a row died before a rollout ended, the last one {dead.fate}"
            raise PenstockError(f"{text}; look into {dead.log}, then the same command goes on")
        self._events.emit("stage", text=f"process {self._orders.number} {dead.fate}; what it ran is made again by another")

    async def close(self) -> None:
        """End the process that is here."""
        if self.child is not None:
            await self.child.close()


class ProcessPool:
    """Stands for the runners of several processes; see `Runner`."""

    def __init__(self, places: list[ProcessSlot], events: Events, pool: Pool) -> None:
        self._places, self._events, self._pool = places, events, pool

    async def run(self, rollout: Rollout, task: Task, sampling: Sampling) -> End | None:
        """See `Runner.run`. WorkerLost comes once another process is there to take the next attempt."""
        place = min(self._places, key=lambda place: place.room)
        child = await place.living()
        started = asyncio.get_running_loop().time()
        try:
            return await child.run(rollout, task, sampling)
        except ProcessLost as lost:
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
) -> AsyncGenerator[ProcessPool]:
    """Start `count` of them, each with an engine, a gateway and a runner of its own; leaving ends them and undoes what they run."""
    folder.secret()  # made once, and not by several at the same time
    async with _writer_process(config, folder) as scribe:
        orders = WorkerSetup(
            config=config.model_dump(mode="json"),
            recipe=AgentSpec.of(inputs.agent).write().decode(),
            model=inputs.model,
            model_folder=str(inputs.folder),
            run_folder=str(folder.path),
            scribe=scribe,
        )
        shares = [config.rollout.concurrency // count + (number < config.rollout.concurrency % count) for number in range(count)]
        places = [ProcessSlot(replace(orders, number=number, at_once=share), events) for number, share in enumerate(shares)]
        try:
            await _start_all(places)
            yield ProcessPool(places, events, pool)
        finally:
            async with asyncio.TaskGroup() as closing:
                for place in places:
                    closing.create_task(place.close())


def prefetch_count(concurrency: int, count: int) -> int:
    """Rollouts that wait in `count` processes: as many as end there while the next ones are on their way."""
    return 0 if count == 1 else count * max(1, concurrency // count // 4)


@asynccontextmanager
async def _writer_process(config: RunConfig, folder: RunFolder) -> AsyncGenerator[str]:
    """One that writes for all, where they would wait for each other's turn at a file; nobody where a server takes their writes."""
    if config.pool.name != "sqlite":
        yield ""
        return
    with process_lock(folder.path) as descriptor:
        async with open_writer_process(folder.path, keeps=[descriptor]) as address:
            yield address


async def _start_all(places: list[ProcessSlot]) -> None:
    try:
        async with asyncio.TaskGroup() as starting:
            for place in places:
                starting.create_task(place.living())
    except ExceptionGroup as group:  # they have one reason, most likely
        raise next(leaves(group)) from None
