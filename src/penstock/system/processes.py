"""Child processes: starting and ending them, their groups, their orphans, and children that serve until their parent is gone.

A serving child is a module run with `python -m`. It reads its settings as one line of JSON from stdin and answers with one line of
JSON on stdout: that it is ready, or `{"error": …}`. The parent keeps the child's stdin open: it ends with the parent, even with one
that was killed, and the child ends with it.
"""

import asyncio
import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import orjson

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
GC_THRESHOLDS = 100_000, 10, 10
"""At Python's 700 new objects, many concurrent calls are scanned again and again, and almost nothing of them is garbage: it took a
sixth of a rollout's processor time. 32 short rollouts make about as many as these."""


def relax_gc() -> None:
    """Collect garbage less often in this process, which serves many calls at once; for main programs, not for libraries."""
    gc.set_threshold(*GC_THRESHOLDS)


SWITCH_S = 0.0005


def switch_threads_often() -> None:
    """Lower the interpreter's switch interval.

    At Python's default of 5 ms, a thread that gives up the interpreter's lock with every call of a library (a statement of
    SQLite, a launch of a kernel) would wait that long for it each time that another thread is busy.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


# Starting


def module_command(module: str) -> list[str]:
    """The command that runs a module of ours in an interpreter like this one, whatever files lie in the current folder."""
    return [sys.executable, "-P", "-u", "-m", module]  # unbuffered: what was printed before a crash is seen


def run_module(
    module: str,
    *arguments: str,
    stdin: bytes,
    output: int,
    timeout_s: float,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    wrap: Callable[[list[str]], list[str]] = list,
) -> int | None:
    """Run a module to its end and return its exit code, None past `timeout_s`; then nothing of its process group is left.

    `wrap` returns what to start in place of its command, such as that of a sandbox.
    """
    process = subprocess.Popen(
        wrap([*module_command(module), *arguments]),
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    try:
        process.communicate(stdin, timeout=timeout_s)
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def spawn_detached(command: list[str], *, log: Path, stdin: int | None = None) -> int:
    """Start a process that outlives this one, in its own session so that no Ctrl-C here reaches it; returns its id."""
    source = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0) if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0)
    output = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[source, output, (os.POSIX_SPAWN_DUP2, 1, 2)],
        setsid=True,
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],  # whatever this process ignores
        setsigmask=[],
    )


async def start_child(module: str, settings: bytes, *, stderr: IO[bytes] | None = None, pass_fds: Sequence[int] = ()) -> Process:
    """Starts a serving child in its own session and send it its settings."""
    command = module_command(module)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=stderr, pass_fds=pass_fds, start_new_session=True
    )
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(settings + b"\n")
    return process


async def read_answer(process: Process, died: str) -> dict[str, Any]:
    """Wait for the line with which a child says that it is ready; `{"error": died}` if it ends without one."""
    assert process.stdout is not None, "it is a pipe"
    line = await process.stdout.readline()
    return orjson.loads(line) if line else {"error": died}


# In the child


def write_answer(**fields: object) -> None:
    """Write a line of JSON to stdout; a parent that is gone has no use for it."""
    with suppress(BrokenPipeError):
        os.write(1, orjson.dumps(fields) + b"\n")


def exit_after_parent(pipe: int, grace_s: float, begin: Callable[[], object] | None = None) -> None:
    """Watch `pipe`, which the parent holds open: once it is closed, call `begin` and end this process `grace_s` later.

    That is done by a thread, since the author's code may block the main thread.
    """

    def watch() -> None:
        hangup = select.poll()
        hangup.register(pipe, 0)  # for no event but the hangup, which is always reported
        hangup.poll()
        if begin is not None:
            begin()
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` for a child that the kernel is to kill when this process ends; None where the system cannot."""
    if sys.platform != "linux":
        return None
    parent, prctl = (
        os.getpid(),
        ctypes.CDLL(None, use_errno=True).prctl,
    )  # loaded here: a forked child should call as little as it can

    def request() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)

    return request


def protect_memory() -> None:
    """Keeps other programs of the same user from reading this process: its memory, environment and open files. Linux only.

    It holds for forked children too, until they execute another program. Debuggers and profilers then need root.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


# Ending


async def end_process(process: Process, grace_s: float, *, ask: Callable[[], object] | None = None) -> None:
    """Ask `process` to end, and kill it with its group once it has ended or `grace_s` has passed.

    It is asked by SIGTERM unless `ask` does it otherwise. The process is dead when this returns. A cancellation kills it at once.
    """
    try:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                (ask or process.terminate)()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
    finally:
        kill_process(process)
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()
            with suppress(OSError):
                await process.stdin.wait_closed()


async def end_group(process: Process, grace_s: float) -> None:
    """`end_process`, where every process of the group is asked."""
    await end_process(process, grace_s, ask=partial(signal_group, process.pid, signal.SIGTERM))


def kill_process(process: Process) -> None:
    """Kill a process with the group that it leads, if it leads one."""
    if not signal_group(process.pid, signal.SIGKILL) and process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


def signal_group(pid: int, number: int) -> bool:
    """Send a signal to every process of the group that `pid` leads; False if there is none."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def describe_exit(code: int) -> str:
    """An exit code as `subprocess` gives it, in words that follow "its process".

    >>> describe_exit(-11), describe_exit(3)
    ('was killed by SIGSEGV', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have numbers only
        name = f"signal {-code}"
    return f"was killed by {name}" + (", by the user or for want of memory" if -code == signal.SIGKILL else "")


def last_line(text: str) -> str:
    """The last line that is not blank: mostly why a program failed."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# Orphans: on Linux, descendants whose parent has died can be handed to us instead of to init, wherever they hid from their group


def adopt_orphans() -> None:
    """From now on, orphans among our descendants become our children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def child_pids() -> set[int]:
    """Our children, adopted ones included; empty where the system does not list them."""
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return set()


def kill_orphans(known: Collection[int]) -> bool:
    """Kill every child that is not `known`, and reap those that have died; returns whether there were any."""
    orphans = child_pids().difference(known)
    for pid in orphans:
        with suppress(ProcessLookupError, ChildProcessError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


M_ARENA_MAX = -8


@cache
def _library() -> ctypes.CDLL | None:
    """Returns glibc; None where the C library is another one."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


def share_heap() -> None:
    """Makes threads that start from now on use one heap, unless MALLOC_ARENA_MAX says how many there are to be."""
    library = _library()
    if library is not None and "MALLOC_ARENA_MAX" not in os.environ:
        library.mallopt(M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Gives free memory back to the system; tenths of a second for gigabytes, in which no thread can allocate."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)
