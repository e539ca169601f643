"""One of the processes that make an evaluation's attempts: `python -m penstock.evals.worker_process`, started by `processes.py`.

JSON lines come in by stdin: `Orders`, then an `Order` each. JSON lines go out by stdout: that it is ready, or why it cannot be;
every event; and how each rollout came out. stdin ends with the parent, and with stdin this process.
"""

import asyncio
import os
import select
import sys
import threading
import time
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
from penstock.pool.sqlite import open_pool
from penstock.records import Rollout, Sampling, Task
from penstock.rollout.executors.base import read_section
from penstock.rollout.runner import Room, Runner
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.run.opening import open_rollout_runner
from penstock.sdk.agent_spec import AgentSpec
from penstock.system.garbage import collect_seldom
from penstock.system.locks import FileLock

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
    """What a process is told once."""

    config: dict[str, Any]
    recipe: str
    """Of the agent; see `Recipe`."""
    model: str
    model_folder: str
    run_folder: str
    number: int = 0
    at_once: int = 1
    """Rollouts whose agents run at once; others that it is asked for wait here, so that none has to be asked for in between."""
    scribe: str = ""
    """The address of the process that writes for all of them; see `open_scribe`. Empty where each writes by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRolloutRequest:
    """A rollout to run to its end."""

    rollout: Rollout
    task: Task
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """What a process is told again and again: one of these."""

    ask: EvalRolloutRequest | None = None
    cancel: str = ""
    """The id of a rollout that is to be undone."""


class LineWriter:
    """Lines to the parent. What is said in one turn of the loop is written at once; where the parent is slow, this waits."""

    def __init__(self, out: FileIO) -> None:
        self._out = out
        self._lines: list[bytes] = []

    def say(self, **line: Any) -> None:
        """Send one line with these fields, soon."""
        if not self._lines:
            asyncio.get_running_loop().call_soon(self.flush)
        self._lines.append(json_line(line))

    def flush(self) -> None:
        """Send what was said; a parent that is gone has no use for it."""
        waiting, self._lines = memoryview(b"".join(self._lines)), []
        with suppress(BrokenPipeError):
            while waiting:
                waiting = waiting[self._out.write(waiting) :]


async def run_worker(orders: WorkerSetup, pipe: asyncio.StreamReader, teller: LineWriter) -> None:
    """Run what the parent asks for until `pipe` ends."""
    agent = AgentSpec.read(orders.recipe.encode()).load()
    config = make_config(orders.config, "the evaluation's config")
    folder = RunFolder(Path(orders.run_folder), resumed=True)
    inputs = Inputs(
        tasks=[],
        heldout=[],
        agent=agent,
        executor=read_section(config.rollout.executor, config.executor),
        model=orders.model,
        folder=Path(orders.model_folder),
    )
    events = Events()
    events.listen(partial(_forward_event, teller, orders.number))
    with process_lock(folder.path):
        pool = _open_pool(config, orders)
        try:
            async with open_rollout_runner(config, inputs, folder, events, pool) as opened:
                teller.say(ready=True)
                await _serve(pipe, opened.runner, teller, asyncio.Semaphore(orders.at_once))
        finally:
            await pool.close()


def _open_pool(config: RunConfig, orders: WorkerSetup) -> Pool:
    folder = Path(orders.run_folder)
    if orders.scribe:
        return open_pool(folder, scribe=orders.scribe)
    return POOLS.load(config.pool.name)(folder, url=config.pool.url)


def _forward_event(teller: LineWriter, number: int, kind: str, fields: dict[str, Any]) -> None:
    if kind != "stage" or number == 0:  # all of them load the same
        teller.say(event=kind, fields=fields)


async def _serve(pipe: asyncio.StreamReader, runner: Runner, teller: LineWriter, room: Room) -> None:
    running: dict[str, asyncio.Task[dict[str, Any]]] = {}

    def over(rollout_id: str, done: asyncio.Task[dict[str, Any]]) -> None:
        del running[rollout_id]
        told = {"error": "WorkerLost", "message": "it was cancelled"} if done.cancelled() else done.result()
        teller.say(over=rollout_id, **told)

    async with asyncio.TaskGroup() as group:
        while line := await pipe.readline():
            order = from_json(WorkerCommand, line)
            if order.ask is not None:
                task = running[order.ask.rollout.id] = group.create_task(_run(order.ask, runner, room))
                task.add_done_callback(partial(over, order.ask.rollout.id))
            elif order.cancel in running:
                running[order.cancel].cancel()
        for task in running.values():
            task.cancel()


async def _run(ask: EvalRolloutRequest, runner: Runner, room: Room) -> dict[str, Any]:
    """How a rollout came out, as the parent is told."""
    try:
        return {"end": await runner.run(ask.rollout, ask.task, ask.sampling, room=room)}
    except PenstockError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": "", "message": f"rollout {ask.rollout.id}: {type(error).__name__}: {error}"}


class _Pipes(NamedTuple):
    orders: FileIO
    out: FileIO


def _own_pipes() -> _Pipes:
    """stdin and stdout for this module alone: an agent that reads finds nothing, and what it prints goes to stderr."""
    pipes = _Pipes(FileIO(os.dup(0), "rb"), FileIO(os.dup(1), "wb"))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return pipes


def _exit_after_parent(orders: FileIO) -> None:
    """End this process some time after its parent, even where an agent blocks the event loop."""
    gone = select.poll()
    gone.register(orders, 0)  # hanging up alone
    gone.poll()
    time.sleep(EXIT_S)
    os._exit(1)


async def _main(pipes: _Pipes) -> int:
    pipe, teller = asyncio.StreamReader(limit=MAX_LINE_BYTES), LineWriter(pipes.out)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), pipes.orders)
    try:
        if line := await pipe.readline():
            await run_worker(from_json(WorkerSetup, line), pipe, teller)
    except PenstockError as error:
        teller.say(refused=str(error), bad_input=isinstance(error, ConfigError))
        return 2
    finally:
        teller.flush()
        transport.close()
    return 0


if __name__ == "__main__":
    collect_seldom()
    own = _own_pipes()
    threading.Thread(target=_exit_after_parent, args=(own.orders,), daemon=True).start()
    sys.exit(asyncio.run(_main(own)))
