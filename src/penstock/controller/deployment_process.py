"""One deployment's process, kept up: started, asked whether it is well, and started again when it is not."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import orjson

from penstock.codec import to_json
from penstock.controller.model_server import ModelServerSpec
from penstock.errors import ControllerError

FIRST_WAIT_S, LONGEST_WAIT_S, STABLE_S = 0.2, 30.0, 60.0
"""Before a process that ended is started again: doubled each time for one that did not live long."""
HEALTH_INTERVAL_S, MAX_MISSED = 10.0, 3
"""How often it is asked whether it is well, and how many answers may be missing."""
START_TIMEOUT_S = 600.0
"""The longest that loading a model may take."""
GRACE_S = 8.0
"""For a process to end after it was asked to."""


class DeploymentProcess:
    """Keeps a process up while `run` runs; cancel that to end it. `moved` is told the port whenever it serves."""

    def __init__(
        self, orders: ModelServerSpec, log: Path, moved: Callable[[int], None], *, health_s: float = HEALTH_INTERVAL_S
    ) -> None:
        self._orders, self._log, self._moved, self._health_s = orders, log, moved, health_s
        self.settled = asyncio.Event()
        """Set once it serves, or could not be started the first time."""
        self.url: str | None = None
        """Ends in `/v1`; None while nothing serves."""
        self.pid: int | None = None
        self.failure: str | None = None
        """Why it does not serve."""

    async def run(self, *, patient: bool) -> None:
        """Keep it up. Unless `patient`, return where the first process cannot serve at all."""
        loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
        while True:
            began = loop.time()
            try:
                await self._serve()
            except (ControllerError, OSError, TimeoutError, ValueError) as cause:
                self.failure = str(cause) or "it did not start in time"
                if not (patient or self.settled.is_set()):
                    self.settled.set()
                    return
            wait_s = FIRST_WAIT_S if loop.time() - began > STABLE_S else min(wait_s * 2, LONGEST_WAIT_S)
            await asyncio.sleep(wait_s)

    async def _serve(self) -> None:
        """From the start of a process to its end, whatever brings that about."""
        process = await self._start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.url = await self._ready(process)
            self.pid, self.failure = process.pid, None
            self._orders = replace(self._orders, port=urlsplit(self.url).port or 0)
            self._moved(self._orders.port)
            self.settled.set()
            await self._until_unwell(process)
        finally:
            self.url = self.pid = None
            await _end_process(process)

    async def _start(self) -> Process:
        command = (sys.executable, "-P", "-m", "penstock.controller.model_server")
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=log, start_new_session=True)
        assert process.stdin is not None, "it is a pipe, held open as long as the controller lives"
        process.stdin.write(to_json(self._orders) + b"\n")
        return process

    async def _ready(self, process: Process) -> str:
        assert process.stdout is not None, "it is a pipe"
        line = await process.stdout.readline()
        told = orjson.loads(line) if line else {"error": f"its process ended as it started; {self._log} says why"}
        if "error" in told:
            raise ControllerError(told["error"], code="DEPLOYMENT_FAILED", status=409)
        return told["url"]

    async def _until_unwell(self, process: Process) -> None:
        """Return when the process has ended, or does not answer any more."""
        ended, missed = asyncio.ensure_future(process.wait()), 0
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._health_s)) as session:
                while missed < MAX_MISSED:
                    done, _ = await asyncio.wait({ended}, timeout=self._health_s)
                    if done:
                        self.failure = f"its process ended with {process.returncode}; it is started again"
                        return
                    missed = 0 if await self._is_well(session) else missed + 1
            self.failure = f"its process gave no answer {MAX_MISSED} times; it is started again"
            _kill(process)
        finally:
            ended.cancel()

    async def _is_well(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{(self.url or '').removesuffix('/v1')}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


async def _end_process(process: Process) -> None:
    """End a process and all that it started, and wait until it is gone; a cancellation waits for that too."""
    ending = asyncio.ensure_future(_terminate(process))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        _kill(process)
        await ending
        raise


async def _terminate(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.wait()
    _kill(process)
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()
        with suppress(OSError):
            await process.stdin.wait_closed()


def _kill(process: Process) -> None:
    """The whole session that it leads: it may have started others."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
