"""The process of one job: it runs the author's workflow or grader in its own event loop, sends the result, and exits.

The fork server forks it, or runs this module in a fresh interpreter.
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
from penstock.errors import one_line
from penstock.events import Events
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.in_process import InProcessAgent
from penstock.rollout.processes.job_protocol import STARTED, AgentJob, JobSandbox, failure_result, read_samples, receive, send
from penstock.sdk.clients import Clients
from penstock.sdk.discovery import Agent, AgentSpec
from penstock.sdk.environment import rollout_environment
from penstock.sdk.samples import RolloutSample
from penstock.system.namespaces import confine_process
from penstock.system.processes import adopt_orphans, protect_memory

SOCKET_FD = 3
"""The file descriptor at which a fresh interpreter finds its socket."""


def run_job(sock: socket.socket, agent: Agent | None, output: int) -> None:
    """Reads a job from `sock`, runs it in its own session and sends the result. Without a log, it prints to `output`."""
    os.setsid()
    adopt_orphans()
    protect_memory()
    sock.set_inheritable(False)
    spec, job = AgentSpec.read(receive(sock)), from_json(AgentJob, receive(sock))
    samples = read_samples(receive(sock))
    kill_on_hangup(sock)
    os.register_at_fork(after_in_child=sock.close)  # the agent's own forks must not write to it
    _redirect_output(job.log, output)
    if job.session is not None:
        os.environ.update(rollout_environment(job.session.base_url, job.session.token, job.session.rollout.id))
    if job.sandbox is not None:
        enter_sandbox(job.sandbox, job.artifacts_dir)
    if agent is None:
        try:
            agent = spec.load()
        except Exception as error:  # the same file was loaded before; whatever is wrong now belongs to this job
            return _send_result(sock, failure_result(error, job.kind))
    _limit_memory(job.memory_mb)
    _reseed()
    return asyncio.run(_run_and_send(sock, job, agent, samples))


def enter_sandbox(sandbox: JobSandbox, artifacts: str | None) -> None:
    """Confines this process for good; OSError where the machine does not allow it."""
    own = [artifacts] if artifacts else []
    if sandbox.name == "namespaces":
        paths = {"hidden": sandbox.hidden, "readonly": sandbox.readonly, "writable": (*sandbox.visible, *own)}
        confine_process(**{kind: [Path(path) for path in found] for kind, found in paths.items()})
    elif sandbox.name == "user":
        os.setgroups([])
        os.setresgid(sandbox.user, sandbox.user, sandbox.user)
        os.setresuid(sandbox.user, sandbox.user, sandbox.user)
        if own:
            os.environ["HOME"] = own[0]  # the one of before is another user's


def kill_on_hangup(sock: socket.socket) -> None:
    """Lets the kernel kill our whole process group when the other end of `sock` closes, or sends anything.

    O_ASYNC makes the kernel send a signal when the socket becomes readable, and F_SETSIG makes that signal SIGKILL. It works
    whatever the author's code does meanwhile, even in C. On other systems than Linux, the fork server must kill us.
    """
    if sys.platform == "linux":
        fcntl.fcntl(sock, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(sock, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if poll.poll(0):  # it closed before the signal was armed
        os._exit(1)


def ignore_hangup(sock: socket.socket) -> None:
    if sys.platform == "linux":
        fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) & ~os.O_ASYNC)


def _redirect_output(log: str | None, output: int) -> None:
    """Sends all output of this process to the log, also the stack of a crash."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log else os.dup(output)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # the author's file may have put anything there
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    faulthandler.enable(2)


def _limit_memory(memory_mb: int | None) -> None:
    """Limits memory beyond what the process has already. RLIMIT_DATA, unlike RLIMIT_AS, leaves reserved address space free."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if memory_mb is None or sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data + stack
    limit = pages * resource.getpagesize() + (memory_mb << 20)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _reseed() -> None:
    # Python reseeds its own generator after a fork; numpy's would give the same numbers in every job.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


async def _run_and_send(sock: socket.socket, job: AgentJob, agent: Agent, samples: dict[str, RolloutSample]) -> None:
    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in a task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    send(sock, STARTED)
    try:
        result = await _run_agent(job, agent, samples)
    except Exception as error:  # also a bug of ours is sent, since nobody would see it here
        result = failure_result(error, job.kind)
    _send_result(sock, result)


async def _run_agent(job: AgentJob, agent: Agent, samples: dict[str, RolloutSample]) -> dict[str, Any]:
    folder = Path(job.artifacts_dir) if job.artifacts_dir else None
    runner = InProcessAgent(agent, AuthorTasks(agent.entry.parent, Events(), grace_s=job.grace_s, in_thread=False))
    if job.session is None:
        return {"rewards": await runner.grade(job.task, samples, timeout_s=job.timeout_s, artifacts_dir=folder)}
    clients = Clients()
    try:
        context = job.session.context(clients)
        return (await runner.run(job.task, context, timeout_s=job.timeout_s, artifacts_dir=folder))._asdict()
    finally:
        await clients.close()


def _send_result(sock: socket.socket, result: Mapping[str, Any]) -> None:
    frame = json.dumps(result, default=str).encode()
    ignore_hangup(sock)
    send(sock, frame)
    sock.close()


def exit_process(error: BaseException | None = None) -> NoReturn:
    """Ends this process without running exit hooks or joining threads: in a fork they are the parent's."""
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
        run_job(socket.socket(fileno=SOCKET_FD), None, 2)
    except BaseException as error:  # the edge of the process
        exit_process(error)
    exit_process()
