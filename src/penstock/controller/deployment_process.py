"""Keeps one deployment's model server running: starts it, checks its health, and restarts it when it fails."""

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
"""Pause before a restart: doubled, up to a limit, unless the process lived longer than STABLE_S."""
HEALTH_INTERVAL_S, MAX_MISSED = 10.0, 3
"""Pause between health checks, and how many may fail in a row before a restart."""
START_TIMEOUT_S = 600.0
"""For loading the model."""
GRACE_S = 8.0
"""Between SIGTERM and SIGKILL."""


class DeploymentProcess:
    """Keeps a model server running until `run` is cancelled. `save_port` gets the port each time the server is ready."""

    def __init__(
        self, spec: ModelServerSpec, log: Path, save_port: Callable[[int], None], *, health_s: float = HEALTH_INTERVAL_S
    ) -> None:
        self._spec, self._log, self._save_port, self._health_s = spec, log, save_port, health_s
        self.settled = asyncio.Event()
        """Set once the server is ready, or could not be started the first time."""
        self.url: str | None = None
        """Ends in `/v1`; None while no server is ready."""
        self.pid: int | None = None
        self.failure: str | None = None
        """Why no server is ready."""

    async def run(self, *, retry_start: bool) -> None:
        """Restarts the server for ever. Without `retry_start`, returns if the first start fails."""
        loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
        while True:
            began = loop.time()
            try:
                await self._serve()
            except (ControllerError, OSError, TimeoutError, ValueError) as cause:
                self.failure = str(cause) or "it did not start in time"
                if not (retry_start or self.settled.is_set()):
                    self.settled.set()
                    return
            wait_s = FIRST_WAIT_S if loop.time() - began > STABLE_S else min(wait_s * 2, LONGEST_WAIT_S)
            await asyncio.sleep(wait_s)

    async def _serve(self) -> None:
        """Runs one server process from its start to its end."""
        process = await self._start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.url = await self._read_url(process)
            self.pid, self.failure = process.pid, None
            self._spec = replace(self._spec, port=urlsplit(self.url).port or 0)
            self._save_port(self._spec.port)
            self.settled.set()
            await self._watch_health(process)
        finally:
            self.url = self.pid = None
            await _end_process(process)

    async def _start(self) -> Process:
        command = (sys.executable, "-P", "-m", "penstock.controller.model_server")
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=log, start_new_session=True)
        assert process.stdin is not None, "it is a pipe; the server ends when it is closed, so also when the controller is killed"
        process.stdin.write(to_json(self._spec) + b"\n")
        return process

    async def _read_url(self, process: Process) -> str:
        assert process.stdout is not None, "it is a pipe"
        line = await process.stdout.readline()
        status = orjson.loads(line) if line else {"error": f"its process ended as it started; {self._log} says why"}
        if "error" in status:
            raise ControllerError(status["error"], code="DEPLOYMENT_FAILED", status=409)
        return status["url"]

    async def _watch_health(self, process: Process) -> None:
        """Returns when the process has ended or no longer answers."""
        ended, missed = asyncio.ensure_future(process.wait()), 0
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._health_s)) as session:
                while missed < MAX_MISSED:
                    done, _ = await asyncio.wait({ended}, timeout=self._health_s)
                    if done:
                        self.failure = f"its process ended with {process.returncode}; it is started again"
                        return
                    missed = 0 if await self._is_healthy(session) else missed + 1
            self.failure = f"its process gave no answer {MAX_MISSED} times; it is started again"
            _kill(process)
        finally:
            ended.cancel()

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{(self.url or '').removesuffix('/v1')}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


async def _end_process(process: Process) -> None:
    """Ends a process and its session, and waits for it. A cancellation meanwhile kills it at once, but still waits."""
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
    """Kills the process group: vLLM starts further processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
