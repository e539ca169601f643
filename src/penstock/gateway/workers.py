"""Several worker processes on one port: a supervisor starts them, replaces one that dies, and stops them all.

Each worker is this module run as a program. It reads its config from stdin, writes one line on stdout when it serves or why it
cannot, and stops on SIGTERM or when its parent is gone.
"""

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.codec import from_json, to_json
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.gateway.shared_counters import Peers
from penstock.gateway.standalone import ModelFiles, Settings, load_secret, open_gateway, read_settings
from penstock.http.listen import bind
from penstock.system.processes import end_process, kill_process, read_answer, relax_gc, start_child, write_answer

FIRST_RESTART_WAIT_S, MAX_RESTART_WAIT_S = 0.1, 10.0
"""Before a worker that died within `YOUNG_S` is replaced; doubled each time."""
YOUNG_S = 30.0
GRACE_S = 5.0
"""For a worker to exit after its calls have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    settings: dict[str, Any]
    folder: str
    model: str
    model_folder: str
    host: str
    port: int
    workers: int
    number: int = 0
    is_open: bool = False
    sessions: bool = False

    @property
    def shared_folder(self) -> Path:
        """Where workers keep their counters and metrics."""
        return Path(self.folder) / "workers"


def make_worker_config(
    settings: Settings,
    model: ModelFiles,
    *,
    folder: Path,
    port: int,
    workers: int,
    is_open: bool = False,
    sessions: bool = False,
) -> WorkerConfig:
    """The config of all workers; each gets its own `number`."""
    return WorkerConfig(
        settings=settings.model_dump(mode="json"),
        folder=str(folder),
        model=model.name,
        model_folder=str(model.path),
        host=settings.gateway.host,
        port=port,
        workers=workers,
        is_open=is_open,
        sessions=sessions,
    )


class WorkerSupervisor:
    """The parent process. Calls `ready` with the process ids once all workers serve, and `report` when one dies or is replaced."""

    def __init__(
        self, config: WorkerConfig, *, drain_s: float, ready: Callable[[list[int]], None], report: Callable[[str], None]
    ) -> None:
        self._config = config
        self._drain_s = drain_s
        self._ready = ready
        self._report = report
        self._processes: dict[int, Process] = {}
        self._serving: set[int] = set()
        self._started = False

    async def run(self, stop: asyncio.Event) -> None:
        """Keep all workers up until `stop`; ConfigError or EngineError if one cannot start at all."""
        self._config.shared_folder.mkdir(exist_ok=True)
        for old in self._config.shared_folder.iterdir():
            old.unlink()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep(number)) for number in range(self._config.workers)]
                await stop.wait()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except asyncio.CancelledError:
            for process in self._living():
                kill_process(process)
            raise
        finally:
            await self._end_all()

    async def _keep(self, number: int) -> None:
        """Start worker `number`, and start it again whenever it dies."""
        loop, wait_s = asyncio.get_running_loop(), FIRST_RESTART_WAIT_S
        while True:
            began = loop.time()
            process = await self._start(number)
            await self._await_ready(number, process)
            code = await process.wait()
            wait_s = FIRST_RESTART_WAIT_S if loop.time() - began > YOUNG_S else min(wait_s * 2, MAX_RESTART_WAIT_S)
            self._report(f"worker {number} (process {process.pid}) ended with {code}; another one starts")
            await asyncio.sleep(wait_s)

    async def _start(self, number: int) -> Process:
        process = await start_child("penstock.gateway.workers", to_json(replace(self._config, number=number)))
        self._processes[number] = process
        return process

    async def _await_ready(self, number: int, process: Process) -> None:
        status = await read_answer(process, f"worker {number} died as it started")
        if "error" in status and not self._started:
            raise (ConfigError if status.get("bad_input") else EngineError)(status["error"])
        if "error" in status or self._started:
            self._report(status.get("error") or f"worker {number} serves again, as process {process.pid}")
            return
        self._serving.add(number)
        if len(self._serving) == self._config.workers:
            self._started = True
            self._ready([self._processes[each].pid for each in sorted(self._processes)])

    async def _end_all(self) -> None:
        """Send SIGTERM, wait, and kill what is left."""
        async with asyncio.TaskGroup() as group:
            for process in self._living():
                group.create_task(end_process(process, self._drain_s + GRACE_S))

    def _living(self) -> list[Process]:
        return [process for process in self._processes.values() if process.returncode is None]  # ids of others may be reused


async def run_worker(config: WorkerConfig, parent_pipe: asyncio.StreamReader) -> None:
    """Serve until SIGTERM, or until the parent is gone."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings, folder = read_settings(config.settings), Path(config.folder)
    peers = Peers(config.number, config.workers, config.shared_folder)
    model = ModelFiles(name=config.model, path=Path(config.model_folder))
    sock = bind(config.host, config.port, shared=True)
    opening = open_gateway(
        settings,
        model,
        folder=folder,
        secret=load_secret(folder),
        sock=sock,
        peers=peers,
        is_open=config.is_open,
        sessions=config.sessions,
    )
    async with opening as opened:
        write_answer(event="ready")
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(peers.save_periodically(opened.gateway.samples)),
                group.create_task(_stop_with_parent(parent_pipe, stop)),
            ]
            await stop.wait()
            for task in tasks:
                task.cancel()
    await asyncio.to_thread(peers.save, opened.gateway.samples())


async def _stop_with_parent(pipe: asyncio.StreamReader, stop: asyncio.Event) -> None:
    await pipe.read()
    stop.set()


async def _main() -> int:
    pipe = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin.buffer)
    config = from_json(WorkerConfig, await pipe.readline())
    try:
        await run_worker(config, pipe)
    except PenstockError as error:
        write_answer(error=str(error), bad_input=isinstance(error, ConfigError))
        return 2
    return 0


if __name__ == "__main__":
    relax_gc()
    sys.exit(asyncio.run(_main()))
