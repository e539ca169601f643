"""The zygote as we see it: started when needed, started again if it dies, and the way to a process for each job."""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

from penstock.errors import ConfigError
from penstock.rollout.processes.fork_server import ASK, BEGIN, ENDED, KILL, ORDER
from penstock.rollout.processes.job_protocol import receive_async, send_async
from penstock.sdk.agent_spec import AgentSpec
from penstock.sdk.discovery import Agent
from penstock.system.async_tools import settled
from penstock.system.processes import describe_exit, module_command, signal_group

KILLED_S = 10.0
"""For the kernel to make an end of what was killed."""
LAST_WORDS_S = 1.0


class ProcessDied(Exception):
    """A job's process is gone, or never came; the message follows "its process"."""


class JobProcess:
    """The process of one job. `ended` holds how it ended, in words; by then all that it started is dead too."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sock = sock

    async def say(self, *frames: bytes) -> None:
        """Tell it something; ProcessDied where nobody is there."""
        try:
            await send_async(self._sock, *frames)
        except ConnectionError:
            raise ProcessDied(await self.ended) from None

    async def hear(self) -> bytes:
        """What it says next; ProcessDied where it has ended without a word."""
        reading = asyncio.ensure_future(receive_async(self._sock))
        try:
            await asyncio.wait({reading, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading}, timeout=LAST_WORDS_S)
            if reading.done():
                return reading.result()
        except EOFError:
            pass
        finally:
            reading.cancel()
            await asyncio.wait({reading})
        raise ProcessDied(await self.ended)

    def close(self) -> None:
        """Let go of it; on Linux, whatever is left of it dies of that."""
        self._sock.close()


class ForkClient:
    """A context manager around the zygote of one agent; no process outlives it."""

    def __init__(self, agent: Agent, *, fresh: bool, start_s: float) -> None:
        self.forks = False
        """Whether jobs are forked; else each has a fresh interpreter."""
        self._agent = agent
        self._recipe = AgentSpec.of(agent).write()
        self._fresh = fresh
        self._start_s = start_s
        self._jobs: dict[int, JobProcess] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._zygote: Process | None = None
        self._control: socket.socket | None = None
        self._rest = b""

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hang_up("was ended with the run")
        await settled(self._bury())

    @asynccontextmanager
    async def job(self, grace_s: float) -> AsyncGenerator[JobProcess, None]:
        """A new process; it is dead when this is left. Left by a cancellation, it is asked first, and has `grace_s` to clean up.

        Left without an error, it has `grace_s` to end by itself.
        """
        process = await self._begin()
        try:
            yield process
        except asyncio.CancelledError:
            await settled(self._end(process, grace_s, ask=True))
            raise
        except BaseException:
            await settled(self._end(process, 0.0))
            raise
        else:
            await settled(self._end(process, grace_s))

    async def _begin(self) -> JobProcess:
        async with self._starting:
            if self._control is None:
                await self._restart()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = JobProcess(next(self._numbers) % (1 << 32), ours)
        self._jobs[process.number] = process
        try:
            with theirs:
                await self._order(BEGIN, process.number, theirs.fileno())
        except BaseException:
            del self._jobs[process.number]
            ours.close()
            raise
        return process

    async def _end(self, process: JobProcess, grace_s: float, *, ask: bool = False) -> None:
        with suppress(ProcessDied):  # with the zygote gone, closing the socket is what ends it
            if ask:
                await self._order(ASK, process.number)
            if grace_s:
                await asyncio.wait({process.ended}, timeout=grace_s)
            if not process.ended.done():
                await self._order(KILL, process.number)
                await asyncio.wait({process.ended}, timeout=KILLED_S)
        self._jobs.pop(process.number, None)
        process.close()

    async def _order(self, what: bytes, number: int, *fds: int) -> None:
        while True:
            if self._control is None:
                raise ProcessDied("lost the one that starts it")
            try:
                socket.send_fds(self._control, [ORDER.pack(what, number)], fds)
            except BlockingIOError:
                await _writable(self._control)
            except ConnectionError:
                self._hang_up("died with the one that starts them")
            else:
                return

    async def _restart(self) -> None:
        await self._bury()
        try:
            await self._start()
        except ConfigError as error:
            raise ProcessDied(f"could not be started: {error}") from error

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        line = [*module_command("penstock.rollout.processes.fork_server"), str(theirs.fileno())]
        with theirs:
            self._zygote = await asyncio.create_subprocess_exec(
                *line,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control = ours
        try:
            async with asyncio.timeout(self._start_s):
                await send_async(ours, self._recipe, json.dumps(self._fresh).encode())
                self._check(json.loads(await receive_async(ours)))
        except BaseException as error:
            self._hang_up("never began")
            await settled(self._bury())
            if isinstance(error, TimeoutError):
                text = f"{self._agent.entry}: importing it took longer than executor.start_s = {self._start_s:g}; raise it"
                raise ConfigError(text) from error
            if isinstance(error, EOFError | ConnectionError):
                code = self._zygote.returncode or 0
                raise ConfigError(f"{self._agent.entry}: the process that imports it {describe_exit(code)}") from error
            raise
        asyncio.get_running_loop().add_reader(ours, self._listen, ours)

    def _check(self, found: dict[str, Any]) -> None:
        if refused := found.get("refused"):
            raise ConfigError(refused)
        ours = (self._agent.workflow.__name__, self._agent.grader and self._agent.grader.__name__)
        theirs = (found["workflow"], found["grader"] if self._agent.grader else None)
        if ours != theirs:
            text = f"holds {' and '.join(filter(None, theirs))}, not {' and '.join(filter(None, ours))}"
            raise ConfigError(f"{self._agent.entry}: {text}; the process executor runs what is in that file")
        self.forks = found["forks"]

    def _listen(self, control: socket.socket) -> None:
        """Note which jobs have ended, or that the zygote itself has."""
        try:
            told = control.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            told = b""
        if not told:
            self._hang_up("died with the one that starts them")
            return
        self._rest += told
        whole = len(self._rest) // ENDED.size * ENDED.size
        for number, status in ENDED.iter_unpack(self._rest[:whole]):
            if process := self._jobs.get(number):
                _settle(process, _fate(status))
        self._rest = self._rest[whole:]

    def _hang_up(self, fate: str) -> None:
        """Give up the zygote: it dies of it, if it has not, and so does every job."""
        control, self._control, self._rest = self._control, None, b""
        if control is None:
            return
        asyncio.get_running_loop().remove_reader(control)
        control.close()
        for process in self._jobs.values():
            _settle(process, fate)

    async def _bury(self) -> None:
        if self._zygote is None:
            return
        try:
            async with asyncio.timeout(KILLED_S):
                await self._zygote.wait()
        except TimeoutError:
            signal_group(self._zygote.pid, signal.SIGKILL)
            await self._zygote.wait()


def _settle(process: JobProcess, fate: str) -> None:
    if not process.ended.done():
        process.ended.set_result(fate)


def _fate(status: int) -> str:
    return describe_exit(os.waitstatus_to_exitcode(status)) if status >= 0 else f"could not be started: {os.strerror(-status)}"


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)
