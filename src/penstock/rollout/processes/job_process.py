"""The process of one job: it runs the author's workflow or grader in an event loop of its own, tells what came of it, and ends.

Forked from the zygote, or as a module that is run, in a fresh interpreter.
"""

import asyncio
import faulthandler
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from penstock.codec import from_json
from penstock.events import Events
from penstock.rollout.author_tasks import AuthorTasks, one_line
from penstock.rollout.execution import Work
from penstock.rollout.processes.job_protocol import BEGUN, Job, failed, read_samples, receive, send
from penstock.sdk.agent_spec import AgentSpec
from penstock.sdk.clients import Clients
from penstock.sdk.discovery import Agent
from penstock.sdk.environment import routes
from penstock.sdk.samples import RolloutSample
from penstock.system.processes import adopt_orphans

FRESH_FD = 3
"""Where a fresh interpreter finds its socket."""


def run_job(sock: socket.socket, agent: Agent | None, output: int) -> None:
    """Take the job from `sock`, do it in a session of our own, answer. `output` is where it may print if the job has no log."""
    os.setsid()
    adopt_orphans()
    sock.set_inheritable(False)
    recipe, job = AgentSpec.read(receive(sock)), from_json(Job, receive(sock))
    samples = read_samples(receive(sock))
    tie(sock)
    os.register_at_fork(after_in_child=sock.close)  # what the agent forks must not speak in its name
    _print_to(job.log, output)
    if job.seat is not None:
        os.environ.update(routes(job.seat.base_url, job.seat.token, job.seat.rollout.id))
    if agent is None:
        try:
            agent = recipe.load()
        except Exception as error:  # the same file was loaded before; whatever is wrong now belongs to this job
            return _answer(sock, failed(error, job.kind))
    _limit(job.memory_mb)
    _reseed()
    return asyncio.run(_perform(sock, job, agent, samples))


def tie(sock: socket.socket) -> None:
    """Let the kernel kill our whole process group when the other end of `sock` goes away, or says anything at all.

    It works whatever the author's code is doing meanwhile. Elsewhere than on Linux, the zygote must notice.
    """
    if sys.platform == "linux":
        fcntl.fcntl(sock, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(sock, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(sock, select.POLLIN)
    if gone.poll(0):  # before we were tied to it
        os._exit(1)


def untie(sock: socket.socket) -> None:
    if sys.platform == "linux":
        fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) & ~os.O_ASYNC)


def _print_to(log: str | None, output: int) -> None:
    """From now on, what anything in this process prints goes to the log; a crash leaves its stack there too."""
    place = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log else os.dup(output)
    os.dup2(place, 1)
    os.dup2(place, 2)
    os.close(place)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # the author's file may have put anything there
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    faulthandler.enable(2)


def _limit(memory_mb: int | None) -> None:
    """Memory beyond what the process has already, as `data` counts it: mere reservations of address space are free."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if memory_mb is None or sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * resource.getpagesize() + (memory_mb << 20)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _reseed() -> None:
    """Let rollouts differ: Python's own generator takes a new seed after a fork, numpy's would go on as in all the others."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


async def _perform(sock: socket.socket, job: Job, agent: Agent, samples: dict[str, RolloutSample]) -> None:
    me = asyncio.current_task()
    assert me is not None  # a coroutine runs in a task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    send(sock, BEGUN)
    try:
        answer = await _work(job, agent, samples)
    except Exception as error:  # theirs come named; any other is told, since nobody would see it here
        answer = failed(error, job.kind)
    _answer(sock, answer)


async def _work(job: Job, agent: Agent, samples: dict[str, RolloutSample]) -> dict[str, Any]:
    folder = Path(job.artifacts_dir) if job.artifacts_dir else None
    work = Work(agent, AuthorTasks(agent.entry.parent, Events(), grace_s=job.grace_s))
    if job.seat is None:
        return {"rewards": await work.grade(job.task, samples, timeout_s=job.timeout_s, artifacts_dir=folder)}
    clients = Clients()
    try:
        return (await work.run(job.task, job.seat.context(clients), timeout_s=job.timeout_s, artifacts_dir=folder))._asdict()
    finally:
        await clients.close()


def _answer(sock: socket.socket, answer: Mapping[str, Any]) -> None:
    frame = json.dumps(answer, default=str).encode()
    untie(sock)
    send(sock, frame)
    sock.close()


def leave(error: BaseException | None = None) -> NoReturn:
    """End this process without exit hooks and threads: a fork's are its parent's, and the answer is out."""
    code = error.code if isinstance(error, SystemExit) else 1 if error else 0
    try:
        if error is not None and not isinstance(error, asyncio.CancelledError | SystemExit):
            os.write(2, f"{one_line(error)}\n".encode())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    try:
        run_job(socket.socket(fileno=FRESH_FD), None, 2)
    except BaseException as error:  # the edge of the process
        leave(error)
    leave()
