"""Several worker processes on one port: a parent that starts them, replaces one that dies, and stops them all.

Each worker is this module run as a program. It reads its orders from stdin, says on stdout that it serves or why it cannot, and
stops when it is told to or when its parent is gone.
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

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0
"""Before a worker that died young is replaced; doubled each time."""
YOUNG_S = 30.0
GRACE_S = 5.0
"""For a worker to end, after its calls have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a worker is to do."""

    settings: dict[str, Any]
    folder: str
    model: str
    model_folder: str
    host: str
    port: int
    of: int
    number: int = 0
    is_open: bool = False

    @property
    def counts(self) -> Path:
        """Where workers keep what they have counted."""
        return Path(self.folder) / "workers"


def make_orders(settings: Settings, model: ModelFiles, *, folder: Path, port: int, workers: int, is_open: bool = False) -> Orders:
    """The same for all workers, but for their number."""
    return Orders(
        settings=settings.model_dump(mode="json"),
        folder=str(folder),
        model=model.name,
        model_folder=str(model.path),
        host=settings.gateway.host,
        port=port,
        of=workers,
        is_open=is_open,
    )


class Crew:
    """The parent's side. `ready` is called with the process ids once all serve, `tell` with what a person should know."""

    def __init__(self, orders: Orders, *, drain_s: float, ready: Callable[[list[int]], None], tell: Callable[[str], None]) -> None:
        self._orders = orders
        self._drain_s = drain_s
        self._ready = ready
        self._tell = tell
        self._processes: dict[int, Process] = {}
        self._serving: set[int] = set()
        self._told = False

    async def run(self, stop: asyncio.Event) -> None:
        """Keep all workers up until `stop`; ConfigError or EngineError where one cannot even start."""
        self._orders.counts.mkdir(exist_ok=True)
        for old in self._orders.counts.iterdir():
            old.unlink()
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(number)) for number in range(self._orders.of)]
                await stop.wait()
                for keeper in keepers:
                    keeper.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except asyncio.CancelledError:
            for process in self._living():
                kill_process(process)
            raise
        finally:
            await self._end_all()

    async def _keep(self, number: int) -> None:
        """Start a worker, and another one when it dies."""
        loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
        while True:
            began = loop.time()
            process = await self._start(number)
            await self._await_ready(number, process)
            code = await process.wait()
            wait_s = FIRST_WAIT_S if loop.time() - began > YOUNG_S else min(wait_s * 2, LONGEST_WAIT_S)
            self._tell(f"worker {number} (process {process.pid}) ended with {code}; another one starts")
            await asyncio.sleep(wait_s)

    async def _start(self, number: int) -> Process:
        process = await start_child("penstock.gateway.workers", to_json(replace(self._orders, number=number)))
        self._processes[number] = process
        return process

    async def _await_ready(self, number: int, process: Process) -> None:
        found = await read_answer(process, f"worker {number} died as it started")
        if "error" in found and not self._told:
            raise (ConfigError if found.get("bad_input") else EngineError)(found["error"])
        if "error" in found or self._told:
            self._tell(found.get("error") or f"worker {number} serves again, as process {process.pid}")
            return
        self._serving.add(number)
        if len(self._serving) == self._orders.of:
            self._told = True
            self._ready([self._processes[each].pid for each in sorted(self._processes)])

    async def _end_all(self) -> None:
        """Ask all of them to stop, wait, and end those that still do not."""
        async with asyncio.TaskGroup() as group:
            for process in self._living():
                group.create_task(end_process(process, self._drain_s + GRACE_S))

    def _living(self) -> list[Process]:
        return [process for process in self._processes.values() if process.returncode is None]  # ids of others may be reused


async def work(orders: Orders, orders_pipe: asyncio.StreamReader) -> None:
    """Serve until SIGTERM, or until the parent is gone."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings, folder = read_settings(orders.settings), Path(orders.folder)
    peers = Peers(orders.number, orders.of, orders.counts)
    model = ModelFiles(name=orders.model, path=Path(orders.model_folder))
    sock = bind(orders.host, orders.port, shared=True)
    opening = open_gateway(
        settings, model, folder=folder, secret=load_secret(folder), sock=sock, peers=peers, is_open=orders.is_open
    )
    async with opening as opened:
        write_answer(event="ready")
        async with asyncio.TaskGroup() as group:
            asides = [group.create_task(peers.keep(opened.gateway.samples)), group.create_task(_until_gone(orders_pipe, stop))]
            await stop.wait()
            for aside in asides:
                aside.cancel()
    await asyncio.to_thread(peers.save, opened.gateway.samples())


async def _until_gone(pipe: asyncio.StreamReader, stop: asyncio.Event) -> None:
    await pipe.read()
    stop.set()


async def _main() -> int:
    pipe = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin.buffer)
    orders = from_json(Orders, await pipe.readline())
    try:
        await work(orders, pipe)
    except PenstockError as error:
        write_answer(error=str(error), bad_input=isinstance(error, ConfigError))
        return 2
    return 0


if __name__ == "__main__":
    relax_gc()
    sys.exit(asyncio.run(_main()))
