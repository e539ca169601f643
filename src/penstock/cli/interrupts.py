"""Ctrl-C: once is a safe stop after the running step, twice is now. Neither needs an event loop that runs."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from penstock.system import signal_watcher

GRACE_S = 3.0
"""How long a second Ctrl-C waits for the run to end before the process exits anyway."""
BLOCKED_S = 3.0
"""How long the event loop may take to hear of a first signal. A loop that an agent blocks never does: it counts as two then."""
TERMINATE_S = 10.0
"""For a run: seconds after which one SIGTERM counts as two, as a supervisor sends SIGKILL next, not a second one."""
INTERRUPTED = 130


class Interrupts:
    """Inside it, the first SIGINT or SIGTERM sets `stop` and calls `notify`; the second cancels the task that entered.

    A second signal leaves on disk what a kill would leave, and a run can be resumed after a kill. So a process whose threads or
    agent do not end is ended after `GRACE_S`. With `terminate_s`, a SIGTERM that has not ended the block by then
    counts as two. So does any signal that the loop does not hear of. Where native code holds the interpreter, none of this
    runs: `signal_watcher`, a process of its own, ends ours then.
    """

    def __init__(self, stop: asyncio.Event, notify: Callable[[], None], *, terminate_s: float | None = None) -> None:
        self._stop = stop
        self._notify = notify
        self._terminate_s = terminate_s
        self._before: dict[int, Any] = {}
        self._count = 0
        self._heard = threading.Event()
        self.first: int | None = None
        """The first signal that came."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._loop.set_default_executor(LeavableThreads())
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._wakeup_before = signal.set_wakeup_fd(-1)
        self._start_watcher()
        self._take_signals()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._retake.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._to_watcher.close()  # which ends it
        self._watcher.wait()

    def _start_watcher(self) -> None:
        self._to_watcher, read = socket.socketpair()
        self._to_watcher.setblocking(False)
        patience_s = BLOCKED_S + GRACE_S + 1
        command = [sys.executable, "-I", "-S", signal_watcher.__file__, str(os.getpid()), str(patience_s)]
        # What an agent could read there: nothing but where shared libraries are, which an interpreter may need.
        environment = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        with read:
            self._watcher = subprocess.Popen(command, stdin=read.fileno(), env=environment)

    def _take_signals(self) -> None:
        """Again each second: an agent, or a library of its, may set handlers of its own."""
        if any(signal.getsignal(number) != self._on_signal for number in self._before):
            for number in self._before:
                signal.signal(number, self._on_signal)
            signal.set_wakeup_fd(self._to_watcher.fileno(), warn_on_full_buffer=False)
        self._retake = self._loop.call_later(1.0, self._take_signals)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # not loop.add_signal_handler: this runs even while an agent blocks the loop
        self._count += 1
        self.first = self.first or number
        self._loop.call_soon_threadsafe(self._on_heard)
        if self._count == 1:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._loop.call_soon_threadsafe(self._notify)
            self._later(BLOCKED_S, self._end_if_blocked)
            if number == signal.SIGTERM and self._terminate_s is not None:
                self._later(self._terminate_s, self._end)
        elif self._count == 2:
            self._end()
        else:
            _quit()

    def _on_heard(self) -> None:
        self._heard.set()
        with suppress(OSError):  # it has ended
            self._to_watcher.send(bytes([signal_watcher.HEARD]))

    def _end_if_blocked(self) -> None:
        if not self._heard.is_set():
            self._end()

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


class LeavableThreads(ThreadPoolExecutor):
    """The threads of `asyncio.to_thread`. Closing the loop waits for them no longer than `GRACE_S`: an agent's may never end.

    So many that calls of agents that never return do not use up those that the run itself needs.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1024, thread_name_prefix="asyncio")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))


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
    os.write(2, signal_watcher.QUIT)
    os._exit(INTERRUPTED)
