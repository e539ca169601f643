"""The processes that make an evaluation's attempts, seen from their parent: each one started, supervised and replaced when it dies.

From the outside in: the checks of `eval.processes`, `ProcessPool` (a runner over several processes), `ProcessSlot` (one process and
its successors), `EvalProcess` (one child process, with JSON lines on its stdin and stdout; see `worker_process`).
"""

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
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.pool.remote_writer import open_writer_process
from penstock.records import Attempt, End, Rollout, Sampling, Task
from penstock.rollout.executors import EXECUTORS
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.sdk.agent_spec import AgentSpec
from penstock.sdk.discovery import Agent
from penstock.system.async_tools import leaf_errors
from penstock.system.processes import describe_exit, last_line, module_command, signal_group

ERRORS = {kind.__name__: kind for kind in (ConfigError, EngineError, GraderError, PoolError, PoolFailed, WorkerLost)}
"""What a rollout may raise, by name; anything else is a PenstockError here."""
MAX_DEATHS = 5
"""Processes that may die in one slot, each before it brought a rollout to its end, until the evaluation is given up."""
DRAIN_S = 1.0
"""How long output of a dead process may still arrive, where something that it started holds its stdout open."""
KILL_S = 5.0
"""For the system to end a process that was killed."""
LONG_S, BUSY = 10.0, 0.85
"""From how many seconds, and from which share of CPU time, an evaluation in one process gets a hint."""


# Checks of the settings


def check_processes(config: RunConfig) -> None:
    """Raises ConfigError if the settings allow one process only; needs nothing but them."""
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
    if getattr(EXECUTORS.load(config.rollout.executor), "runs_elsewhere", False):
        text = f"rollout.executor = {config.rollout.executor!r} runs agents elsewhere already; leave eval.processes at 1"
        raise ConfigError(f"eval.processes = {count}: {text}")


def check_limits(config: RunConfig, agent: Agent) -> None:
    """Raises ConfigError if the author limits concurrency, as each process would count by itself."""
    for name, own in (("workflow", agent.workflow_config), ("grader", agent.grader_config)):
        if config.eval.processes > 1 and own is not None and own.concurrency.max_concurrent is not None:
            text = f"the {name}'s concurrency.max_concurrent = {own.concurrency.max_concurrent} would hold for each of them"
            raise ConfigError(f"eval.processes = {config.eval.processes}: {text}; leave one of the two out")


def processes_hint(config: RunConfig, agent: Agent, *, busy_s: float, seconds: float) -> str:
    """Returns a hint to use more processes if one process computed for `busy_s` of an evaluation's `seconds`; mostly empty."""
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


def prefetch_count(concurrency: int, count: int) -> int:
    """Returns how many rollouts wait in `count` processes beyond those that run: as many as end there during one round trip."""
    return 0 if count == 1 else count * max(1, concurrency // count // 4)


# A runner over several processes


@asynccontextmanager
async def open_processes(
    config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events, pool: Pool, *, count: int
) -> AsyncGenerator["ProcessPool"]:
    """Start `count` processes, each with its own engine, gateway and runner; leaving ends them and cancels what they run."""
    async with _writer_process(config, folder) as writer_address:
        setup = WorkerSetup(
            config=config.model_dump(mode="json"),
            agent_spec=AgentSpec.of(inputs.agent).write().decode(),
            model=inputs.model,
            model_folder=str(inputs.folder),
            run_folder=str(folder.path),
            writer_address=writer_address,
        )
        shares = [config.rollout.concurrency // count + (number < config.rollout.concurrency % count) for number in range(count)]
        slots = [ProcessSlot(replace(setup, number=number, concurrency=share), events) for number, share in enumerate(shares)]
        try:
            await _start_all(slots)
            yield ProcessPool(slots, events, pool)
        finally:
            async with asyncio.TaskGroup() as closing:
                for slot in slots:
                    closing.create_task(slot.close())


@asynccontextmanager
async def _writer_process(config: RunConfig, folder: RunFolder) -> AsyncGenerator[str]:
    """Yields the address of one process that writes the SQLite file for all, as they would wait for its lock; else an empty one."""
    if not POOLS.load(config.pool.name).has_writer_process:
        yield ""
        return
    with process_lock(folder.path) as descriptor:
        async with open_writer_process(folder.path, keeps=[descriptor]) as address:
            yield address


async def _start_all(slots: list["ProcessSlot"]) -> None:
    try:
        async with asyncio.TaskGroup() as starting:
            for slot in slots:
                starting.create_task(slot.living())
    except ExceptionGroup as group:  # most likely they all have the same reason
        raise next(leaf_errors(group)) from None


class ProcessPool:
    """Runs rollouts like a `Runner`, in whichever process has the most room."""

    def __init__(self, slots: list["ProcessSlot"], events: Events, pool: Pool) -> None:
        self._slots, self._events, self._pool = slots, events, pool

    async def run(self, rollout: Rollout, task: Task, sampling: Sampling) -> End | None:
        """See `Runner.run`. WorkerLost is raised once another process is ready for the next attempt."""
        slot = min(self._slots, key=lambda slot: slot.load)
        process = await slot.living()
        started = asyncio.get_running_loop().time()
        try:
            return await process.run(rollout, task, sampling)
        except ProcessLost as lost:
            attempt = await self._pool.attempt(rollout.id)  # it may have ended before its process died without an answer
            if lost.end_missing:
                self._emit_end(attempt, str(lost), asyncio.get_running_loop().time() - started)
            if attempt.end is not None:
                return attempt.end
            await slot.living()
            raise

    def _emit_end(self, attempt: Attempt, reason: str, seconds: float) -> None:
        """Emit the event that the dead process did not."""
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


class ProcessSlot:
    """One process, and its successor where it dies."""

    def __init__(self, setup: WorkerSetup, events: Events) -> None:
        self.process: EvalProcess | None = None
        self._setup, self._events = setup, events
        self._lock = asyncio.Lock()
        self._deaths = 0
        """In a row, with no rollout brought to its end in between."""

    @property
    def load(self) -> tuple[bool, int]:
        """The slot with the least load has the most room; one whose process is dead comes last."""
        if self.process is None or self.process.is_over:
            return True, 0
        return False, len(self.process.running) - self._setup.concurrency

    async def living(self) -> "EvalProcess":
        """Returns the process, or a new one if it died; PenstockError where that would die like those before it."""
        async with self._lock:
            if self.process is None or self.process.is_over:
                self._count_death(self.process)
                self.process = await start_process(self._setup, self._events)
            return self.process

    def _count_death(self, dead: "EvalProcess | None") -> None:
        if dead is None:
            return
        self._deaths = 0 if dead.ended else self._deaths + 1
        if self._deaths > MAX_DEATHS:
            text = f"{self._deaths} processes in a row died before a rollout ended, the last one {dead.fate}"
            raise PenstockError(f"{text}; look into {dead.log}, then the same command goes on")
        self._events.emit("stage", text=f"process {self._setup.number} {dead.fate}; what it ran is made again by another")

    async def close(self) -> None:
        if self.process is not None:
            await self.process.close()


# One process


class ProcessLost(WorkerLost):
    """The process died with the rollout; `end_missing`: its `rollout.start` was emitted, its `rollout.end` was not."""

    def __init__(self, message: str, *, end_missing: bool) -> None:
        super().__init__(message)
        self.end_missing = end_missing


async def start_process(setup: WorkerSetup, events: Events) -> "EvalProcess":
    """Returns a new process, ready for rollouts; ConfigError or EngineError says why it is not."""
    log = Path(setup.run_folder) / f"process-{setup.number}.log"
    with log.open("ab") as stderr:
        process = EvalProcess(setup.number, log, events)
        await asyncio.get_running_loop().subprocess_exec(
            lambda: process,
            *module_command("penstock.evals.worker_process"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    process.send(to_json(setup))
    try:
        await process.ready
    except BaseException:
        await process.close(grace_s=0.0)  # it runs nothing yet
        raise
    return process


@dataclass(slots=True)
class _RunningRollout:
    done: asyncio.Future[End | None]
    answered: bool = False
    end_missing: bool = False


class EvalProcess(asyncio.SubprocessProtocol):
    """A child process; `start_process` makes one. Its events are emitted here as they arrive."""

    def __init__(self, number: int, log: Path, events: Events) -> None:
        loop = asyncio.get_running_loop()
        self.log = log
        """Its stderr."""
        self.running: dict[str, _RunningRollout] = {}
        self.ended = 0
        """Rollouts that it brought to an end."""
        self.fate = ""
        """How it ended, in words."""
        self.ready: asyncio.Future[None] = loop.create_future()
        self._number, self._events, self._loop = number, events, loop
        self._over: asyncio.Future[None] = loop.create_future()
        self._log_start = log.stat().st_size
        self._partial_line = b""
        self._outgoing: list[bytes] = []
        self._stdout_closed = self._exited = False

    @property
    def is_over(self) -> bool:
        return self._over.done()

    async def run(self, rollout: Rollout, task: Task, sampling: Sampling) -> End | None:
        """See `Runner.run`; ProcessLost if the process dies."""
        running = self.running[rollout.id] = _RunningRollout(self._loop.create_future())
        try:
            self.send(to_json(WorkerCommand(request=EvalRolloutRequest(rollout=rollout, task=task, sampling=sampling))))
            return await running.done
        except asyncio.CancelledError:
            if not running.answered and not self.is_over:
                await self._cancel(rollout.id, running)
            raise
        finally:
            del self.running[rollout.id]

    async def _cancel(self, rollout_id: str, running: _RunningRollout) -> None:
        """Have it ended as CANCELLED; if the process is stuck, the next command of the evaluation makes it again."""
        running.done = self._loop.create_future()
        self.send(to_json(WorkerCommand(cancel=rollout_id)))
        await asyncio.wait({running.done}, timeout=EXIT_S)
        if running.done.done():
            running.done.exception()  # retrieved, so that asyncio does not log it: the caller raises the cancellation

    def send(self, line: bytes) -> None:
        """Send a line; those of one turn of the event loop go in one write."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(line)

    def _flush(self) -> None:
        lines, self._outgoing = self._outgoing, []
        if not self._exited and not self._stdin.is_closing():
            self._stdin.write(b"\n".join([*lines, b""]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self._stdin = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            try:
                self._receive(orjson.loads(line))
            except Exception as error:  # a full disk, a listener's bug: asyncio would only log it, and the waiting rollouts hang
                self._fail(error)

    def _receive(self, fields: dict[str, Any]) -> None:
        if kind := fields.get("event"):
            event: dict[str, Any] = fields["fields"]
            if kind in ("rollout.start", "rollout.end") and (running := self.running.get(event["rollout_id"])):
                running.end_missing = kind == "rollout.start"
            self._events.emit(kind, **event)
        elif rollout_id := fields.get("over"):
            self._finish_rollout(rollout_id, fields)
        elif fields.get("ready"):
            self.ready.set_result(None)
        else:
            self.ready.set_exception((ConfigError if fields["bad_input"] else EngineError)(fields["refused"]))

    def _finish_rollout(self, rollout_id: str, fields: dict[str, Any]) -> None:
        running = self.running.get(rollout_id)
        if running is None:
            return
        running.answered = True
        self.ended += "end" in fields
        if running.done.done():
            return
        if "end" in fields:
            running.done.set_result(End(fields["end"]) if fields["end"] else None)
        else:
            running.done.set_exception(ERRORS.get(fields["error"], PenstockError)(fields["message"]))

    def _fail(self, error: Exception) -> None:
        for future in (self.ready, *(running.done for running in self.running.values())):
            if not future.done():
                future.set_exception(error)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._stdout_closed = self._stdout_closed or fd == 1
        if self._stdout_closed and self._exited:
            self._end()

    def process_exited(self) -> None:
        self._exited = True
        if self._stdout_closed:
            self._end()
        else:
            self._loop.call_later(DRAIN_S, self._end)

    def _end(self) -> None:
        """Fail everything that waits for the process."""
        if self.is_over:
            return
        self.fate = describe_exit(self._transport.get_returncode() or 0)
        self._transport.close()
        self._over.set_result(None)
        if not self.ready.done():
            self.ready.set_exception(EngineError(f"process {self._number} {self.fate} as it started{self._last_line()}"))
        for running in self.running.values():
            if not running.done.done():
                text = f"process {self._number} of the evaluation {self.fate}"
                running.done.set_exception(ProcessLost(text, end_missing=running.end_missing))

    def _last_line(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            last = last_line(file.read().decode(errors="replace"))
        return f": {last} (more in {self.log})" if last else ""

    async def close(self, *, grace_s: float = EXIT_S) -> None:
        """Have it cancel what it runs and exit; past `grace_s`, or cancelled, it is killed with its process group."""
        self._stdin.close()
        try:
            await asyncio.wait({self._over}, timeout=grace_s)
        finally:
            if not self._exited:
                signal_group(self._transport.get_pid(), signal.SIGKILL)
            await asyncio.wait({self._over}, timeout=KILL_S)
            with suppress(FileNotFoundError):
                if self.is_over and not self.log.stat().st_size:
                    self.log.unlink()
