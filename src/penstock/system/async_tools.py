"""Asyncio helpers that several rooms need, and Ctrl-C: once is a safe stop after the running step, twice is now."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")

SHIELDED_S = 30.0
"""How long a cancelled caller waits for its shielded work."""
LEAVE_S = 3.0


async def finish_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await a short write to its end; a cancellation that comes meanwhile is raised afterwards."""
    job = asyncio.create_task(work)
    job.add_done_callback(retrieve_exception)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        # A shield protects `job`, but returns at once: without this wait the caller could close what `job` still writes to.
        await asyncio.wait({job}, timeout=SHIELDED_S)
        raise


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """For a task that may fail while nobody waits any more: asyncio prints a traceback of an exception that was never retrieved."""
    _ = task.cancelled() or task.exception()


def leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """The errors inside nested exception groups, in order; the error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            yield from leaf_errors(inner)  # pyright: ignore[reportUnknownArgumentType]
    else:
        yield error


class LeavableThreads(ThreadPoolExecutor):
    """The threads of `asyncio.to_thread`. Closing the loop waits for them at most `LEAVE_S`: an agent's may never end.

    There are enough that agents' calls that never return do not use up those that the run needs.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1024, thread_name_prefix="asyncio")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        deadline = time.monotonic() + LEAVE_S
        for thread in self._threads if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))


GRACE_S = 3.0
"""How long a second Ctrl-C waits for the run to end before the process exits anyway."""
TERMINATE_S = 10.0
"""For a run: seconds after which one SIGTERM counts as two, as a supervisor sends SIGKILL next, not a second one."""
INTERRUPTED = 130
QUIT = b"penstock: quit at once, as a kill would\n"


class Interrupts:
    """Inside it, the first SIGINT or SIGTERM sets `stop` and calls `notify`; the second cancels the task that entered.

    A second signal leaves on disk what a kill would leave, and a run can be resumed after a kill. So a process whose threads or
    agent do not end is ended after `GRACE_S`. With `terminate_s`, a SIGTERM that has not ended the block by then counts as two.
    """

    def __init__(self, stop: asyncio.Event, notify: Callable[[], None], *, terminate_s: float | None = None) -> None:
        self._stop = stop
        self._notify = notify
        self._terminate_s = terminate_s
        self._before: dict[int, Any] = {}
        self._count = 0
        self.first: int | None = None
        """The first signal that came."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._loop.set_default_executor(LeavableThreads())
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self.first = self.first or number
        if self._count == 1:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._loop.call_soon_threadsafe(self._notify)
            if number == signal.SIGTERM and self._terminate_s is not None:
                self._later(self._terminate_s, self._end)
        elif self._count == 2:
            self._end()
        else:
            _quit()

    def _end(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)
            self._later(GRACE_S, _quit)

    @staticmethod
    def _later(seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()

    def _cancel(self) -> None:
        if self._task:
            self._task.cancel()


def leave(code: int) -> NoReturn:
    """Exits. Python would first wait for every thread, and one that an agent has left behind may never end."""
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _quit() -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # the live view hides the cursor
    os.write(2, QUIT)
    os._exit(INTERRUPTED)
