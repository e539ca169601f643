"""Finds author's code that blocks the event loop, says where, and breaks it off.

A blocked loop serves no gateway: a blocking client would wait for ever for the reply that its own thread must send. A thread sends
the loop a callback now and then. If that stays unanswered, it sends the main thread a signal: the handler runs inside the blocking
call, where the context variable tells whose code it is, and the frame where it is.

Native code may keep the interpreter to itself, so that the thread does not run either. A timer of the kernel, which the thread
puts off as long as it lives, sends a signal then. Regular expressions and large integers look for signals; other code may not.
"""

import asyncio
import contextvars
import linecache
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.events import Events

NOTICE_S = 2.0
"""A block of this length is reported, once for each line."""
BREAK_S = 10.0
"""One of this length is broken off, or sooner if its deadline is."""
POLL_S = 0.5
HELD_S = 10.0
"""Native code that lets no other thread run for so long is broken off, if it looks for signals."""
SIGNAL = getattr(signal, "SIGURG", None)
"""Ignored by default, and used by no library that an agent may import. None on Windows: nothing is broken off there."""
TIMER_SIGNAL = getattr(signal, "SIGVTALRM", None)
"""Of the timer that counts the process's computing, which agents leave alone, unlike `signal.alarm`."""
REMEDY = "use the async client or framework call, or wrap the blocking one in `await asyncio.to_thread(…)`"
HELD_REMEDY = 'bound what it computes, or set rollout.executor = "process"'


class BlockedLoop(asyncio.CancelledError):
    """Raised inside the blocking call. A cancellation, as agents and frameworks catch other errors and go on."""


@dataclass(slots=True, eq=False)
class AuthorWork:
    """A piece of the author's code that runs in the event loop."""

    what: str
    timeout_s: float
    watchdog: "LoopWatchdog"
    task: asyncio.Task[Any] | None = None
    blocked: str = ""
    """Where it blocked the loop for too long; empty if it did not."""
    broken_off: bool = False
    held: bool = False
    """Whether it kept the interpreter to itself: a thread of its own would not help."""


_current: contextvars.ContextVar[AuthorWork | None] = contextvars.ContextVar("penstock_author_work", default=None)


@dataclass(slots=True)
class _Block:
    """A block that goes on; the signal handler fills it in."""

    work: AuthorWork | None = None
    where: str = ""
    since: float = 0.0
    """When `work` was found, by `own_time`."""
    over: bool = False
    """Set when it is time to break it off."""


class LoopWatchdog:
    """Watches one event loop while author's code runs in it. `home` is the author's folder.

    Without `breaks_off`, blocks are only reported: for loops that do not serve the gateway, where a blocking call does return.
    """

    def __init__(self, home: Path, events: Events, *, breaks_off: bool = True) -> None:
        self._home = home.resolve()
        self._events = events
        self._breaks_off = breaks_off
        self._works: set[AuthorWork] = set()
        self._thread: threading.Thread | None = None
        self._block: _Block | None = None
        self._alive = 0.0
        """When the thread last ran, by `own_time` of the loop's thread."""
        self._held = False
        """Whether it did not run for `HELD_S` and the loop has not answered since."""
        self._told: set[str] = set()

    @contextmanager
    def watching(self, work: AuthorWork) -> Generator[None]:
        """Watches the running task, and those that it starts, as `work`."""
        work.task = asyncio.current_task()
        token = _current.set(work)
        self._works.add(work)
        self._start()
        try:
            yield
        finally:
            self._works.discard(work)
            _current.reset(token)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            owner = threading.current_thread()
            if SIGNAL is not None and TIMER_SIGNAL is not None and owner is threading.main_thread():
                signal.signal(SIGNAL, _on_signal)
                signal.signal(TIMER_SIGNAL, _on_timer)
                signal.siginterrupt(TIMER_SIGNAL, False)  # it may come while libraries read and write in other threads
            watch = (asyncio.get_running_loop(), owner)
            # In an empty context: threads inherit ours, and this one outlives the rollout that starts it.
            self._thread = threading.Thread(target=self._watch, args=watch, daemon=True, name="penstock-loop-watchdog")
            contextvars.Context().run(self._thread.start)

    def _watch(self, loop: asyncio.AbstractEventLoop, owner: threading.Thread) -> None:
        wait = threading.Event().wait
        self._alive = own_time(owner)
        while self._works:
            self._put_off_timer(owner)
            answered = threading.Event()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                break
            if _stays_silent(answered, owner):
                self._follow(answered, owner)
            self._held = False
            wait(POLL_S)
        if TIMER_SIGNAL is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)

    def _put_off_timer(self, owner: threading.Thread) -> None:
        self._held, self._alive = self._is_held(owner), own_time(owner)
        if TIMER_SIGNAL is not None and signal.getsignal(TIMER_SIGNAL) is _on_timer:
            signal.setitimer(signal.ITIMER_VIRTUAL, HELD_S)

    def _is_held(self, owner: threading.Thread) -> bool:
        return self._held or own_time(owner) - self._alive >= 0.9 * HELD_S  # the timer's clock is not quite ours

    def _follow(self, answered: threading.Event, owner: threading.Thread) -> None:
        """Tells of a block, breaks it off when it is time, and returns when it is over."""
        self._block = block = _Block()
        while self._works:
            self._put_off_timer(owner)
            self._look(owner)  # again and again: the first look may find an import, and the error may be swallowed
            if answered.wait(POLL_S):
                break
            if block.work is None and (frame := sys._current_frames().get(owner.ident or 0)):  # pyright: ignore[reportPrivateUsage]
                # In native code, or not in the main thread: no handler runs.
                block.where = "" if _is_importing(frame) else self._where(frame, own_only=True)
            if block.where:
                self._tell(block)
            if block.work is not None and own_time(owner) - block.since >= min(BREAK_S, block.work.timeout_s) - NOTICE_S:
                block.work.blocked, block.over = block.where, self._breaks_off
        self._block = None

    def _look(self, owner: threading.Thread) -> None:
        if SIGNAL is not None and owner is threading.main_thread() and owner.ident is not None:
            with suppress(OSError):
                signal.pthread_kill(owner.ident, SIGNAL)

    def on_signal(self, work: AuthorWork, frame: FrameType) -> None:
        """Runs in the main thread, in the call that blocks it."""
        block = self._block
        if block is None:
            return
        if _is_importing(frame):
            return
        if self._held:
            self._break_off_held(work, frame)
        if block.work is None:
            block.since, block.where, block.work = own_time(threading.current_thread()), self._where(frame), work
        elif block.over and block.work is work:
            self._break_off(work)
            raise BlockedLoop(work.blocked)

    def on_timer(self, work: AuthorWork, frame: FrameType) -> None:
        """Runs in the main thread after the process has computed for `HELD_S`, perhaps in other threads."""
        if self._is_held(threading.current_thread()) and not _is_importing(frame):
            self._break_off_held(work, frame)
        signal.setitimer(signal.ITIMER_VIRTUAL, HELD_S)

    def _break_off_held(self, work: AuthorWork, frame: FrameType) -> None:
        where = self._where(frame)
        self._tell_once(work.what, where, f"keeps the interpreter to itself at {where}: nothing else runs; {HELD_REMEDY}")
        if self._breaks_off:
            work.blocked, work.held = where, True
            raise BlockedLoop(where)

    def _break_off(self, work: AuthorWork) -> None:
        """Cancels the work, which may swallow the error, and all that runs the same code: it would block the loop next."""
        for each in self._works:
            if each.what == work.what and each.task is not None:
                each.broken_off, each.blocked = True, work.blocked
                each.task.cancel()

    def _tell(self, block: _Block) -> None:
        waiting = "the gateway and all other rollouts" if self._breaks_off else "all other rollouts of this process"
        text = f"blocks the event loop at {block.where}: {waiting} wait; {REMEDY}"
        self._tell_once(block.work.what if block.work else "the agent", block.where, text)

    def _tell_once(self, what: str, where: str, text: str) -> None:
        if where not in self._told:
            self._told.add(where)
            self._events.emit("loop.blocked", what=what, where=where, text=f"{what} {text}")

    def _where(self, frame: FrameType, *, own_only: bool = False) -> str:
        """Returns the author's innermost line with its source; with `own_only`, an empty string if there is none."""
        own = next((each for each in _stack(frame) if self._is_own(each)), None)
        if own is None and own_only:
            return ""
        found = own or frame
        file, number = found.f_code.co_filename, found.f_lineno
        source = linecache.getline(file, number).strip()
        return f"{Path(file).name}, line {number}" + (f" (`{source[:120]}`)" if source else "")

    def _is_own(self, frame: FrameType) -> bool:
        file = Path(frame.f_code.co_filename)
        return self._home in file.parents and "site-packages" not in file.parts


def own_time(thread: threading.Thread) -> float:
    """A clock in seconds that stands still while the thread waits for a core: on a busy machine that is not its code's fault."""
    try:
        queued_ns = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        queued_ns = 0
    return time.monotonic() - queued_ns / 1e9


def _stays_silent(answered: threading.Event, owner: threading.Thread) -> bool:
    end = own_time(owner) + NOTICE_S
    while (left := end - own_time(owner)) > 0:
        if answered.wait(left):
            return False
    return True


def _on_signal(number: int, frame: FrameType | None) -> None:
    work = _current.get()
    if work is not None and frame is not None:
        work.watchdog.on_signal(work, frame)


def _on_timer(number: int, frame: FrameType | None) -> None:
    work = _current.get()
    if work is not None and frame is not None:
        work.watchdog.on_timer(work, frame)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_importing(frame: FrameType) -> bool:
    """Whether a module is being imported: that takes long once, and some cannot be imported again after they were broken off."""
    return any(each.f_code.co_filename.startswith("<frozen importlib") for each in _stack(frame))
