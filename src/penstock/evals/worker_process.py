"""A process that makes attempts of an evaluation: `python -m penstock.evals.worker_process`, started by `processes.py`.

JSON lines come in by stdin: a `WorkerSetup`, then one `WorkerCommand` each. JSON lines go out by stdout: ready, or why
not; every event; the end of each rollout. stdin ends with the parent, and with stdin this process.
"""

import asyncio
import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from penstock.codec import from_json
from penstock.config import RunConfig, make_config
from penstock.errors import ConfigError, PenstockError
from penstock.events import Events, json_line
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Rollout, Sampling, Task
from penstock.rollout.executors.base import read_section
from penstock.rollout.runner import Runner, Slot
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.run.opening import open_rollout_runner
from penstock.sdk.agent_spec import AgentSpec
from penstock.system.locks import FileLock
from penstock.system.processes import exit_after_parent, relax_gc

MAX_LINE_BYTES = 1 << 30
"""Bytes of one line."""
EXIT_S = 15.0
"""For a process to release everything once its parent is gone; it is then ended as it is."""


@contextmanager
def process_lock(folder: Path) -> Generator[int]:
    """Hold a shared lock that says that a process of the evaluation lives; yields its descriptor.

    The lock ends with this process at the latest, and with the last one that has inherited the descriptor.
    """
    with FileLock(_process_lock(folder)) as lock:
        lock.acquire(shared=True)
        yield lock.descriptor


async def wait_for_processes(folder: Path, events: Events) -> None:
    """Wait until the processes of a command that was killed have ended: what they still write belongs to its attempts."""
    with FileLock(_process_lock(folder)) as lock:
        if lock.try_acquire():
            return
        events.emit("stage", text="waiting for processes of an earlier command to end")
        if not await lock.wait_async(2 * EXIT_S):
            raise PenstockError(f"{folder}: processes of an earlier command still run; end them (`fuser {_process_lock(folder)}`)")


def _process_lock(folder: Path) -> Path:
    return folder / ".processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The first line: what the process opens."""

    config: dict[str, Any]
    agent_spec: str
    model: str
    model_folder: str
    run_folder: str
    number: int = 0
    concurrency: int = 1
    """Rollouts whose agents run at once; further ones wait here, so that the next one starts without a round trip."""
    writer_address: str = ""
    """The address of the process that writes the pool for all; see `open_writer_process`. Empty if each process writes itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRolloutRequest:
    """A rollout to run to its end."""

    rollout: Rollout
    task: Task
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """Every further line: a rollout to run, or the id of one to cancel."""

    request: EvalRolloutRequest | None = None
    cancel: str = ""


class LineWriter:
    """JSON lines to the parent. Lines of one turn of the event loop go in one write, which blocks while the parent is slow."""

    def __init__(self, out: FileIO) -> None:
        self._out = out
        self._lines: list[bytes] = []

    def write(self, **line: Any) -> None:
        if not self._lines:
            asyncio.get_running_loop().call_soon(self.flush)
        self._lines.append(json_line(line))

    def flush(self) -> None:
        """Write the buffered lines; they are dropped if the parent is gone."""
        waiting, self._lines = memoryview(b"".join(self._lines)), []
        with suppress(BrokenPipeError):
            while waiting:  # a raw write may take only a part
                waiting = waiting[self._out.write(waiting) :]


async def run_worker(setup: WorkerSetup, pipe: asyncio.StreamReader, writer: LineWriter) -> None:
    """Run the rollouts that the parent requests until `pipe` ends."""
    agent = AgentSpec.read(setup.agent_spec.encode()).load()
    config = make_config(setup.config, "the evaluation's config")
    folder = RunFolder(Path(setup.run_folder), resumed=True)
    inputs = Inputs(
        tasks=[],
        heldout=[],
        agent=agent,
        executor=read_section(config.rollout.executor, config.executor),
        model=setup.model,
        folder=Path(setup.model_folder),
    )
    events = Events()
    events.listen(partial(_forward_event, writer, setup.number))
    with process_lock(folder.path):
        pool = _open_pool(config, setup)
        try:
            async with open_rollout_runner(config, inputs, folder, events, pool) as opened:
                writer.write(ready=True)
                await _serve(pipe, opened.runner, writer, asyncio.Semaphore(setup.concurrency))
        finally:
            await pool.close()


def _open_pool(config: RunConfig, setup: WorkerSetup) -> Pool:
    options = {"writer_address": setup.writer_address} if setup.writer_address else {}
    return POOLS.load(config.pool.name)(Path(setup.run_folder), url=config.pool.url, **options)


def _forward_event(writer: LineWriter, number: int, kind: str, fields: dict[str, Any]) -> None:
    if kind != "stage" or number == 0:  # every process loads the same things: one of them reports it
        writer.write(event=kind, fields=fields)


async def _serve(pipe: asyncio.StreamReader, runner: Runner, writer: LineWriter, slots: Slot) -> None:
    running: dict[str, asyncio.Task[dict[str, Any]]] = {}

    def report_end(rollout_id: str, done: asyncio.Task[dict[str, Any]]) -> None:
        del running[rollout_id]
        result = {"error": "WorkerLost", "message": "it was cancelled"} if done.cancelled() else done.result()
        writer.write(over=rollout_id, **result)

    async with asyncio.TaskGroup() as group:
        while line := await pipe.readline():
            command = from_json(WorkerCommand, line)
            if command.request is not None:
                rollout_id = command.request.rollout.id
                task = running[rollout_id] = group.create_task(_run(command.request, runner, slots))
                task.add_done_callback(partial(report_end, rollout_id))
            elif command.cancel in running:
                running[command.cancel].cancel()
        for task in running.values():
            task.cancel()


async def _run(request: EvalRolloutRequest, runner: Runner, slots: Slot) -> dict[str, Any]:
    """Returns the rollout's end or error, as fields of the line to the parent."""
    try:
        return {"end": await runner.run(request.rollout, request.task, request.sampling, slot=slots)}
    except PenstockError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": "", "message": f"rollout {request.rollout.id}: {type(error).__name__}: {error}"}


class _Pipes(NamedTuple):
    commands: FileIO
    out: FileIO


def _own_pipes() -> _Pipes:
    """Take stdin and stdout for this module: an agent that reads gets nothing, and what it prints goes to stderr."""
    pipes = _Pipes(FileIO(os.dup(0), "rb"), FileIO(os.dup(1), "wb"))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return pipes


async def _main(pipes: _Pipes) -> int:
    pipe, writer = asyncio.StreamReader(limit=MAX_LINE_BYTES), LineWriter(pipes.out)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), pipes.commands)
    try:
        if line := await pipe.readline():
            await run_worker(from_json(WorkerSetup, line), pipe, writer)
    except PenstockError as error:
        writer.write(refused=str(error), bad_input=isinstance(error, ConfigError))
        return 2
    finally:
        writer.flush()
        transport.close()
    return 0


if __name__ == "__main__":
    relax_gc()
    own = _own_pipes()
    exit_after_parent(own.commands.fileno(), EXIT_S)
    sys.exit(asyncio.run(_main(own)))
