"""The client of the fork server: it starts it, restarts it if it dies, and gets a process for each job from it."""

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
from penstock.rollout.processes.fork_server import BEGIN, COMMAND, JOB_ENDED, KILL, TERMINATE
from penstock.rollout.processes.job_protocol import receive_async, send_async
from penstock.sdk.discovery import Agent, AgentSpec
from penstock.system.async_tools import finish_shielded
from penstock.system.processes import describe_exit, module_command, signal_group

KILLED_S = 10.0
"""How long killed processes may take to be gone."""
FINAL_READ_S = 1.0
"""How long to wait, after a process has ended, for a frame that it sent before."""


class ProcessDied(Exception):
    """A job's process has died or could not be started. The message continues a sentence that begins "its process"."""


class JobProcess:
    """The process of one job. `ended` says in words how it ended; all that it started is dead by then."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sock = sock

    async def send(self, *frames: bytes) -> None:
        """Raises ProcessDied if the process has ended."""
        try:
            await send_async(self._sock, *frames)
        except ConnectionError:
            raise ProcessDied(await self.ended) from None

    async def receive(self) -> bytes:
        """Returns the next frame; ProcessDied if the process has ended without sending one."""
        reading = asyncio.ensure_future(receive_async(self._sock))
        try:
            await asyncio.wait({reading, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading}, timeout=FINAL_READ_S)
            if reading.done():
                return reading.result()
        except EOFError:
            pass
        finally:
            reading.cancel()
            await asyncio.wait({reading})
        raise ProcessDied(await self.ended)

    def close(self) -> None:
        """Closes the socket; on Linux, that kills what is left of the process (`kill_on_hangup`)."""
        self._sock.close()


class ForkClient:
    """A context manager around the fork server of one agent; no process outlives it."""

    def __init__(self, agent: Agent, *, fresh: bool, start_s: float) -> None:
        self.forks = False
        """Whether jobs are forked; if not, each gets a fresh interpreter."""
        self.why_no_namespaces = ""
        """Why jobs cannot be confined in namespaces; empty if they can."""
        self._agent = agent
        self._spec = AgentSpec.of(agent).write()
        self._fresh = fresh
        self._start_s = start_s
        self._jobs: dict[int, JobProcess] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._server: Process | None = None
        self._control: socket.socket | None = None
        self._unread = b""
        """The beginning of a record whose rest has not arrived."""

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._disconnect("was ended with the run")
        await finish_shielded(self._wait_for_exit())

    @asynccontextmanager
    async def job(self, grace_s: float) -> AsyncGenerator[JobProcess, None]:
        """Yields a new process, which is dead on exit.

        After a cancellation it gets SIGTERM and `grace_s` to clean up; without an error it has `grace_s` to end.
        """
        process = await self._begin()
        try:
            yield process
        except asyncio.CancelledError:
            await finish_shielded(self._end(process, grace_s, terminate=True))
            raise
        except BaseException:
            await finish_shielded(self._end(process, 0.0))
            raise
        else:
            await finish_shielded(self._end(process, grace_s))

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
                await self._send_command(BEGIN, process.number, theirs.fileno())
        except BaseException:
            del self._jobs[process.number]
            ours.close()
            raise
        return process

    async def _end(self, process: JobProcess, grace_s: float, *, terminate: bool = False) -> None:
        with suppress(ProcessDied):  # without a fork server, closing the socket kills it
            if terminate:
                await self._send_command(TERMINATE, process.number)
            if grace_s:
                await asyncio.wait({process.ended}, timeout=grace_s)
            if not process.ended.done():
                await self._send_command(KILL, process.number)
                await asyncio.wait({process.ended}, timeout=KILLED_S)
        self._jobs.pop(process.number, None)
        process.close()

    async def _send_command(self, action: bytes, number: int, *fds: int) -> None:
        while True:
            if self._control is None:
                raise ProcessDied("lost the one that starts it")
            try:
                socket.send_fds(self._control, [COMMAND.pack(action, number)], fds)
            except BlockingIOError:
                await _wait_writable(self._control)
            except ConnectionError:
                self._disconnect("died with the one that starts them")
            else:
                return

    async def _restart(self) -> None:
        await self._wait_for_exit()
        try:
            await self._start()
        except ConfigError as error:
            raise ProcessDied(f"could not be started: {error}") from error

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [*module_command("penstock.rollout.processes.fork_server"), str(theirs.fileno())]
        with theirs:
            self._server = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control = ours
        try:
            async with asyncio.timeout(self._start_s):
                await send_async(ours, self._spec, json.dumps(self._fresh).encode())
                self._check_agent(json.loads(await receive_async(ours)))
        except BaseException as error:
            self._disconnect("never began")
            await finish_shielded(self._wait_for_exit())
            if isinstance(error, TimeoutError):
                text = f"{self._agent.entry}: importing it took longer than executor.start_s = {self._start_s:g}; raise it"
                raise ConfigError(text) from error
            if isinstance(error, EOFError | ConnectionError):
                code = self._server.returncode or 0
                raise ConfigError(f"{self._agent.entry}: the process that imports it {describe_exit(code)}") from error
            raise
        asyncio.get_running_loop().add_reader(ours, self._read_ended_jobs, ours)

    def _check_agent(self, found: dict[str, Any]) -> None:
        if refused := found.get("refused"):
            raise ConfigError(refused)
        ours = (self._agent.workflow.__name__, self._agent.grader and self._agent.grader.__name__)
        theirs = (found["workflow"], found["grader"] if self._agent.grader else None)
        if ours != theirs:
            text = f"holds {' and '.join(filter(None, theirs))}, not {' and '.join(filter(None, ours))}"
            raise ConfigError(f"{self._agent.entry}: {text}; the process executor runs what is in that file")
        self.forks, self.why_no_namespaces = found["forks"], found["why_no_namespaces"]

    def _read_ended_jobs(self, control: socket.socket) -> None:
        try:
            received = control.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if not received:
            self._disconnect("died with the one that starts them")
            return
        self._unread += received
        whole = len(self._unread) // JOB_ENDED.size * JOB_ENDED.size
        for number, status in JOB_ENDED.iter_unpack(self._unread[:whole]):
            if process := self._jobs.get(number):
                _set_ended(process, _describe_status(status))
        self._unread = self._unread[whole:]

    def _disconnect(self, how: str) -> None:
        """Closes the control socket, which ends the fork server and every job."""
        control, self._control, self._unread = self._control, None, b""
        if control is None:
            return
        asyncio.get_running_loop().remove_reader(control)
        control.close()
        for process in self._jobs.values():
            _set_ended(process, how)

    async def _wait_for_exit(self) -> None:
        if self._server is None:
            return
        try:
            async with asyncio.timeout(KILLED_S):
                await self._server.wait()
        except TimeoutError:
            signal_group(self._server.pid, signal.SIGKILL)
            await self._server.wait()


def _set_ended(process: JobProcess, how: str) -> None:
    if not process.ended.done():
        process.ended.set_result(how)


def _describe_status(status: int) -> str:
    return describe_exit(os.waitstatus_to_exitcode(status)) if status >= 0 else f"could not be started: {os.strerror(-status)}"


async def _wait_writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)
