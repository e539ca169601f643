"""The fork server: a process that loads the author's file once and forks for each job.

It is started with a control socket. First it receives an agent spec and replies what it found in the author's file. Then it
receives commands of five bytes: begin a job, whose own socket comes along, terminate one, or kill one. For each job that has ended
it sends the exit status. All that a job started is killed with it, and when the control socket closes, so are all jobs.

There is no event loop here and no thread, so that forking is safe. If the author's file starts threads when it is imported, each
job gets a fresh interpreter instead.
"""

import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from penstock.errors import ConfigError
from penstock.rollout.processes.job_process import SOCKET_FD, exit_process, ignore_hangup, kill_on_hangup, run_job
from penstock.rollout.processes.job_protocol import receive, send
from penstock.sdk.clients import preload_clients
from penstock.sdk.discovery import Agent, AgentSpec
from penstock.system.namespaces import confine_process
from penstock.system.processes import adopt_orphans, child_pids, kill_orphans, module_command, protect_memory, signal_group

COMMAND = struct.Struct("!cI")
"""The action, and the job's number."""
BEGIN, TERMINATE, KILL = b"b", b"a", b"k"
JOB_ENDED = struct.Struct("!Ii")
"""A job's number and its wait status; if negative, the errno of a process that could not be started."""
QUIT_S = 5
SWEEP_S = 0.01


class ForkServer:
    """Starts and ends jobs. If `agent` is None, each gets a fresh interpreter."""

    def __init__(self, control: socket.socket, agent: Agent | None, output: int) -> None:
        self._control = control
        self._agent = agent
        self._output = output
        self._jobs: dict[int, int] = {}
        """Process ids by job number."""
        self._import_children = child_pids()
        """Processes that the author's file started when it was imported; they are kept, since any job may need them."""
        # SIGCHLD writes to this pipe, so that one poll waits for commands and for ended jobs.
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)

    def serve(self) -> None:
        """Runs commands until the control socket closes."""
        adopt_orphans()
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup_read, select.POLLIN)
        with suppress(EOFError, ConnectionError):
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if self._wakeup_read in ready:
                    os.read(self._wakeup_read, 4096)
                    self._reap()
                if self._control.fileno() in ready:
                    self._run_command()
        signal.alarm(QUIT_S)  # kills us if the jobs, or exit hooks and threads of the author's file, take too long to end
        for pid in self._jobs.values():
            _kill(pid)
        while kill_orphans(self._import_children):
            select.select([], [], [], SWEEP_S)

    def _run_command(self) -> None:
        command, fds, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if len(command) < COMMAND.size:
            raise EOFError
        action, number = COMMAND.unpack(command)
        if action == BEGIN:
            self._begin(number, fds[0])
        elif pid := self._jobs.get(number):
            _kill(pid) if action == KILL else os.kill(pid, signal.SIGTERM)

    def _begin(self, number: int, fd: int) -> None:
        try:
            self._jobs[number] = self._fork(fd, self._agent) if self._agent else self._spawn(fd)
        except OSError as error:
            self._control.sendall(JOB_ENDED.pack(number, -(error.errno or 1)))
        finally:
            os.close(fd)

    def _fork(self, fd: int, agent: Agent) -> int:
        return os.fork() or self._run_forked(fd, agent)

    def _run_forked(self, fd: int, agent: Agent) -> NoReturn:
        """Runs the job, in the forked process."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.close(self._wakeup_read)
            os.close(self._wakeup_write)
            run_job(socket.socket(fileno=fd), agent, self._output)
        except BaseException as error:  # the edge of the process
            exit_process(error)
        exit_process()

    def _spawn(self, fd: int) -> int:
        dups = ((self._output, 1), (self._output, 2), (fd, SOCKET_FD))
        actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in dups]
        command = module_command("penstock.rollout.processes.job_process")
        return os.posix_spawn(command[0], command, os.environ, file_actions=actions)

    def _reap(self) -> None:
        ended = [item for item in self._jobs.items() if os.waitid(os.P_PID, item[1], os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        for _, pid in ended:
            _kill(pid)  # its group, while the zombie still holds the process id: no other process can have it
        kill_orphans({*self._jobs.values(), *self._import_children})
        for number, pid in ended:
            _, status = os.waitpid(pid, 0)
            del self._jobs[number]
            self._control.sendall(JOB_ENDED.pack(number, status))


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing: the wakeup pipe needs one to be set, SIG_IGN would not write to it."""


def _kill(pid: int) -> None:
    """Kills a job with all that it started. One without its own process group has started nothing."""
    if not signal_group(pid, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def why_no_namespaces() -> str:
    """Tries in a child whether a job could be confined; returns the reason why not."""
    if sys.platform != "linux":
        return "they are for Linux only"
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            confine_process(hidden=[Path(os.devnull)])
        except OSError as error:
            os.write(writing, str(error.strerror or error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    problem = os.read(reading, 1000).decode()
    os.close(reading)
    return problem


def _forks_have_one_thread() -> bool:
    """Whether no library starts a thread in a forked process, which could not be confined then."""
    if (child := os.fork()) == 0:
        os._exit(threading.active_count() - 1)
    _, status = os.waitpid(child, 0)
    return status == 0


def main(control: socket.socket) -> None:
    """Loads the agent, replies what was found, and serves."""
    control.set_inheritable(False)
    protect_memory()
    spec, fresh = AgentSpec.read(receive(control)), json.loads(receive(control))
    output, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # what the file prints on import was shown when the run imported it
    os.dup2(silent, 2)
    kill_on_hangup(control)
    no_namespaces = why_no_namespaces()  # before the agent's libraries, which may start threads in what is forked
    try:
        agent = spec.load()
        preload_clients(agent.entry.resolve().parent)
    except ConfigError as error:
        return send(control, json.dumps({"refused": str(error)}).encode())
    ignore_hangup(control)
    forks = not fresh and threading.active_count() == 1 and _forks_have_one_thread()
    found = {
        "workflow": agent.workflow.__name__,
        "grader": agent.grader and agent.grader.__name__,
        "forks": forks,
        "why_no_namespaces": no_namespaces,
    }
    send(control, json.dumps(found).encode())
    sys.stdout.flush()
    gc.freeze()  # the collector leaves the loaded objects alone, so that forks keep sharing their pages
    ForkServer(control, agent if forks else None, output).serve()
    return None


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):
        main(socket.socket(fileno=int(sys.argv[1])))
