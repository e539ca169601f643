"""Keeps one deployment's model server running: starts it, checks its health, and restarts it when it fails."""

import asyncio
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from penstock.codec import to_json
from penstock.controller.model_server import ModelServerSpec
from penstock.errors import ControllerError
from penstock.system.processes import end_process, kill_process, read_answer, start_child

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
            await end_process(process, GRACE_S)

    async def _start(self) -> Process:
        with self._log.open("ab") as log:
            return await start_child("penstock.controller.model_server", to_json(self._spec), stderr=log)

    async def _read_url(self, process: Process) -> str:
        status = await read_answer(process, f"its process ended as it started; {self._log} says why")
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
            kill_process(process)
        finally:
            ended.cancel()

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{(self.url or '').removesuffix('/v1')}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
