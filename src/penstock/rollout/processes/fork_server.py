"""The zygote: a process that loads the author's file once and forks for each job. It runs none of the jobs and sees none of them.

It is given a socket. A recipe comes first, and the zygote says what it found. Then come orders of five bytes: begin a job, whose
own socket comes with the order, or end one; and for each job that has ended, its status goes back. A job ends with all that it
started, and once the other end is gone, so are all the jobs.

There is no event loop here and no thread, so that forking is safe. Where the author's file starts threads when it is imported, each
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
from types import FrameType
from typing import NoReturn

from penstock.errors import ConfigError
from penstock.rollout.processes.job_process import FRESH_FD, leave, run_job, tie, untie
from penstock.rollout.processes.job_protocol import receive, send
from penstock.rollout.processes.preload import warm
from penstock.sdk.agent_spec import AgentSpec
from penstock.sdk.discovery import Agent
from penstock.system.processes import adopt_orphans, child_pids, kill_orphans, module_command, signal_group

ORDER = struct.Struct("!cI")
"""What to do, and the job's number."""
BEGIN, ASK, KILL = b"b", b"a", b"k"
ENDED = struct.Struct("!Ii")
"""A job's number and its wait status; a negative one is the error number of a process that could not be made."""
QUIT_S = 5
SWEEP_S = 0.01


class ForkServer:
    """The jobs that run, and the way to make more; `agent` is None where each is to have a fresh interpreter."""

    def __init__(self, control: socket.socket, agent: Agent | None, output: int) -> None:
        self._control = control
        self._agent = agent
        self._output = output
        self._jobs: dict[int, int] = {}
        self._kept = child_pids()
        """What the author's file started when it was imported: all jobs may need it."""
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)

    def serve(self) -> None:
        """Follow orders until the other end is gone."""
        adopt_orphans()
        signal.signal(signal.SIGCHLD, _noted)
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)
        news = select.poll()
        news.register(self._control, select.POLLIN)
        news.register(self._bell, select.POLLIN)
        with suppress(EOFError, ConnectionError):
            while True:
                ready = {fd for fd, _ in news.poll()}
                if self._bell in ready:
                    os.read(self._bell, 4096)
                    self._reap()
                if self._control.fileno() in ready:
                    self._follow()
        signal.alarm(QUIT_S)  # in case that the dead, or exit hooks and threads of the author's file, take too long
        for pid in self._jobs.values():
            _kill(pid)
        while kill_orphans(self._kept):
            select.select([], [], [], SWEEP_S)

    def _follow(self) -> None:
        order, fds, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
        if len(order) < ORDER.size:
            raise EOFError
        what, number = ORDER.unpack(order)
        if what == BEGIN:
            self._begin(number, fds[0])
        elif pid := self._jobs.get(number):
            _kill(pid) if what == KILL else os.kill(pid, signal.SIGTERM)

    def _begin(self, number: int, fd: int) -> None:
        try:
            self._jobs[number] = self._fork(fd, self._agent) if self._agent else self._spawn(fd)
        except OSError as error:
            self._control.sendall(ENDED.pack(number, -(error.errno or 1)))
        finally:
            os.close(fd)

    def _fork(self, fd: int, agent: Agent) -> int:
        return os.fork() or self._become(fd, agent)

    def _become(self, fd: int, agent: Agent) -> NoReturn:
        """Be the job's process from now on."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.close(self._bell)
            os.close(self._ring)
            run_job(socket.socket(fileno=fd), agent, self._output)
        except BaseException as error:  # the edge of the process
            leave(error)
        leave()

    def _spawn(self, fd: int) -> int:
        actions = [(os.POSIX_SPAWN_DUP2, place, at) for place, at in ((self._output, 1), (self._output, 2), (fd, FRESH_FD))]
        line = module_command("penstock.rollout.processes.job_process")
        return os.posix_spawn(line[0], line, os.environ, file_actions=actions)

    def _reap(self) -> None:
        ended = [item for item in self._jobs.items() if os.waitid(os.P_PID, item[1], os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        for _, pid in ended:
            _kill(pid)  # its group, before its number can be another's
        kill_orphans({*self._jobs.values(), *self._kept})
        for number, pid in ended:
            _, status = os.waitpid(pid, 0)
            del self._jobs[number]
            self._control.sendall(ENDED.pack(number, status))


def _noted(number: int, frame: FrameType | None) -> None:
    """For a signal whose number is written to a pipe anyway."""


def _kill(pid: int) -> None:
    """A job with all that it started; where it has not yet a group of its own, it has started nothing."""
    if not signal_group(pid, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(control: socket.socket) -> None:
    """What the process does: load, say what was found, serve."""
    control.set_inheritable(False)
    recipe, fresh = AgentSpec.read(receive(control)), json.loads(receive(control))
    output, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # what the file prints when it is imported was seen when we ourselves imported it
    os.dup2(silent, 2)
    tie(control)
    try:
        agent = recipe.load()
        warm(agent.entry.resolve().parent)
    except ConfigError as error:
        return send(control, json.dumps({"refused": str(error)}).encode())
    untie(control)
    forks = not fresh and threading.active_count() == 1
    found = {"workflow": agent.workflow.__name__, "grader": agent.grader and agent.grader.__name__, "forks": forks}
    send(control, json.dumps(found).encode())
    sys.stdout.flush()
    gc.freeze()
    ForkServer(control, agent if forks else None, output).serve()
    return None


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):
        main(socket.socket(fileno=int(sys.argv[1])))
