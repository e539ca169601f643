"""One deployment's process, kept up: started, asked whether it is well, and started again when it is not."""

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
            await end_process(process, GRACE_S)

    async def _start(self) -> Process:
        with self._log.open("ab") as log:
            return await start_child("penstock.controller.model_server", to_json(self._orders), stderr=log)

    async def _ready(self, process: Process) -> str:
        answer = await read_answer(process, f"its process ended as it started; {self._log} says why")
        if "error" in answer:
            raise ControllerError(answer["error"], code="DEPLOYMENT_FAILED", status=409)
        return answer["url"]

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
            kill_process(process)
        finally:
            ended.cancel()

    async def _is_well(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{(self.url or '').removesuffix('/v1')}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
