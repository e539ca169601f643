"""Runs authors' coroutines in an event loop of a separate thread: none outlives its deadline, hangs the run or takes it down.

A call that blocks that loop holds up other rollouts, but never the gateway that must answer it. A thread watches the loop: it
reports the line of a block, and after `BREAK_S` each rollout gets a thread and an event loop to itself.
"""

import asyncio
import linecache
import reprlib
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from contextvars import Context, copy_context
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from penstock.errors import EngineError, PenstockError, WorkerLost, one_line
from penstock.events import Events
from penstock.sdk.workflow import ConcurrencyConfig
from penstock.system.async_tools import LeavableThreads, leaf_errors, retrieve_exception

T = TypeVar("T")

GATEWAY_FAULT_CODES = frozenset({"engine_error", "engine_busy", "not_recorded", "internal_error"})
"""Error codes of calls that failed on the gateway's side, not the caller's."""
NOTICE_S = 2.0
"""A block of this length is reported, once per line."""
BREAK_S = 10.0
"""After blocks of this length in total, or one as long as a deadline, rollouts no longer share an event loop."""
POLL_S = 0.5
REMEDY = "use the async client or framework call, or wrap the blocking one in `await asyncio.to_thread(…)`"


class AuthorJob(Generic[T]):
    """A coroutine that runs in another thread's event loop; `result` is set when it ends."""

    def __init__(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> None:
        self.what = what
        self.timeout_s = timeout_s
        self.result = Future[T]()
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        """Runs in the job's event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._finish)

    def cancel(self) -> None:
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # its loop is closed: it has just ended
                self._loop.call_soon_threadsafe(self._task.cancel)

    def fail(self, error: Exception) -> None:
        """Ends the wait for its result; the coroutine itself may still be blocked."""
        with suppress(InvalidStateError):
            self.result.set_exception(error)

    def _finish(self, task: asyncio.Task[T]) -> None:
        retrieve_exception(task)
        with suppress(InvalidStateError):  # nothing waits for it any more
            if task.cancelled():
                if self.result.cancel():
                    self.result.set_running_or_notify_cancel()
            elif (error := task.exception()) is not None:
                self.result.set_exception(error)
            else:
                self.result.set_result(task.result())


class AuthorLoop:
    """An event loop in a daemon thread: a process does not wait for author code that never ends."""

    def __init__(self) -> None:
        self.jobs: set[AuthorJob[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(LeavableThreads())
        self._closing = False
        self.thread = threading.Thread(target=self._serve, daemon=True, name="penstock-author")
        Context().run(self.thread.start)  # threads inherit the starter's context, and this one outlives its rollout

    def post(self, call: Callable[[], object], context: Context | None = None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, context=context)

    def start(self, job: AuthorJob[Any]) -> None:
        self.jobs.add(job)
        job.result.add_done_callback(lambda _: self.jobs.discard(job))
        self.post(job.start, copy_context())

    def close(self) -> None:
        """Ends the thread as soon as nothing blocks it."""
        self._closing = True
        self.post(self._loop.stop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            with suppress(BaseException):  # SystemExit of an author's own task, which keeps it; the loop must not end
                self._loop.run_forever()
        with suppress(BaseException):
            self._loop.run_until_complete(_end_all())  # a task that swallows its cancellation keeps this thread, nothing else
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)


class AuthorTasks:
    """Runs the author's coroutines. `home` is the author's folder: an error is reported with the last line in it.

    Without `in_thread` they run in the caller's event loop: for a process that serves nothing else and can be killed.
    """

    def __init__(self, home: Path, events: Events, *, grace_s: float = 5.0, in_thread: bool = True) -> None:
        self.abandoned = 0
        """How many did not end after their cancellation."""
        self._home = home.resolve()
        self._events = events
        self._grace_s = grace_s
        self._in_thread = in_thread
        self._shared: AuthorLoop | None = None
        self._alone = False
        """Whether each job gets an event loop to itself, because one blocked the shared loop."""
        self._reported: set[str] = set()
        self._blocked_s = 0.0

    async def run(self, work: Coroutine[Any, Any, T], *, error: type[PenstockError], what: str, timeout_s: float) -> T:
        """Returns what `work` returns. Whatever it raises becomes `error`, or EngineError if the gateway was at fault.

        Raises TimeoutError past the deadline, and WorkerLost if the event loop was blocked for too long: it may be run again.
        Late or cancelled work gets `grace_s` to end and is then abandoned. `what` names the work in error messages.
        """
        job = AuthorJob(self._named(work, error, what), what, timeout_s)
        if not self._in_thread:
            job.start()
        elif self._alone:
            loop = AuthorLoop()
            loop.start(job)
            job.result.add_done_callback(lambda _: loop.close())
        else:
            self._shared_loop().start(job)
        waiting = asyncio.wrap_future(job.result)
        waiting.add_done_callback(retrieve_exception)
        try:
            # `asyncio.wait` instead of `asyncio.timeout`: the author's code may swallow its cancellation, and we must not wait on.
            await asyncio.wait({waiting}, timeout=timeout_s)
            late = not waiting.done()
        finally:
            if not waiting.done():
                await self._cancel(job, waiting)
        if late:
            raise TimeoutError
        if waiting.cancelled():
            raise error(f"{what}: cancelled itself; let it raise an error or return")
        return waiting.result()

    def close(self) -> None:
        """Ends the shared loop."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _shared_loop(self) -> AuthorLoop:
        if self._shared is None:
            self._shared = loop = AuthorLoop()
            weakref.finalize(self, loop.close)
            watch = threading.Thread(target=_watch, args=(weakref.ref(self), loop), daemon=True, name="penstock-author-watchdog")
            Context().run(watch.start)
        return self._shared

    async def _named(self, work: Coroutine[Any, Any, T], error: type[PenstockError], what: str) -> T:
        try:
            return await work
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except SystemExit as cause:
            raise error(f"{what}: called sys.exit({reprlib.repr(cause.code)}); return or raise an error instead") from cause
        except BaseException as cause:  # the author's code: anything may come, and it ends this rollout alone
            leaf = next(leaf_errors(cause))
            kind = EngineError if any(map(_is_gateway_fault, _chain(leaf))) else error
            raise kind(f"{what}: {self._describe(leaf)}") from cause

    def _describe(self, cause: BaseException) -> str:
        lines = [(Path(frame.f_code.co_filename), number) for frame, number in traceback.walk_tb(cause.__traceback__)]
        own = [(file.name, number) for file, number in lines if self._home in file.parents and "site-packages" not in file.parts]
        return one_line(cause) + (f" ({own[-1][0]}, line {own[-1][1]})" if own else "")

    async def _cancel(self, job: AuthorJob[Any], waiting: asyncio.Future[Any]) -> None:
        job.cancel()
        try:
            await asyncio.wait({waiting}, timeout=self._grace_s)
        finally:
            if not waiting.done():
                self.abandoned += 1
                self._events.emit("agent.abandoned", what=job.what, grace_s=self._grace_s)
                job.fail(WorkerLost(f"{job.what}: abandoned"))

    # The watchdog of the shared loop

    def answer_late(self, loop: AuthorLoop, blocked_s: float) -> bool:
        """Reports a loop that has not answered for `blocked_s`; returns whether author code blocks it."""
        if not (where := self._blocked_at(loop)):
            return False
        if blocked_s >= NOTICE_S:
            self._report(loop, where)
            deadline_s = min([BREAK_S, *(job.timeout_s for job in list(loop.jobs))])
            if blocked_s >= deadline_s - NOTICE_S:  # before the deadlines of jobs that only wait
                self._separate(loop, where)
        return True

    def count_block(self, blocked_s: float) -> None:
        """Adds up long blocks that have ended."""
        if blocked_s >= NOTICE_S:
            self._blocked_s += blocked_s
            self._alone = self._alone or self._blocked_s >= BREAK_S

    def shares(self, loop: AuthorLoop) -> bool:
        return loop is self._shared

    def _separate(self, loop: AuthorLoop, where: str) -> None:
        """Leaves a blocked loop for good; its jobs are lost and may run again, each in its own loop."""
        self._alone, self._shared = True, None
        text = f"the agent blocked the event loop at {where} for too long: from now on each rollout runs in its own thread"
        self._events.emit("loop.moved", what="the agent", where=where, text=text)
        for job in list(loop.jobs):
            job.fail(WorkerLost(f"{job.what}: blocked the event loop at {where}; it is made again in its own thread"))
        loop.close()

    def _report(self, loop: AuthorLoop, where: str) -> None:
        if where not in self._reported:
            self._reported.add(where)
            names = {job.what for job in list(loop.jobs)}
            what = names.pop() if len(names) == 1 else "the agent"
            text = f"{what} blocks the event loop at {where}: all other rollouts wait; {REMEDY}"
            self._events.emit("loop.blocked", what=what, where=where, text=text)

    def _blocked_at(self, loop: AuthorLoop) -> str:
        """Returns the author's innermost line with its source; empty for an idle loop and during an import, which is slow once."""
        frames = list(_stack(sys._current_frames().get(loop.thread.ident or 0)))  # pyright: ignore[reportPrivateUsage]
        idle = len(frames) > 1 and frames[1].f_code.co_name == "_run_once"  # it waits for events
        if not frames or idle or any(each.f_code.co_filename.startswith("<frozen importlib") for each in frames):
            return ""
        found = next((each for each in frames if self._is_own(each)), frames[0])
        file, number = found.f_code.co_filename, found.f_lineno
        source = linecache.getline(file, number).strip()
        return f"{Path(file).name}, line {number}" + (f" (`{source[:120]}`)" if source else "")

    def _is_own(self, frame: FrameType) -> bool:
        file = Path(frame.f_code.co_filename)
        return self._home in file.parents and "site-packages" not in file.parts


def _watch(owner: "weakref.ref[AuthorTasks]", loop: AuthorLoop) -> None:
    """Watches a shared loop as long as its owner uses it."""
    while (tasks := owner()) is not None and tasks.shares(loop) and loop.thread.is_alive():
        answered, began = threading.Event(), own_time(loop.thread)
        loop.post(answered.set)
        while not answered.wait(POLL_S) and tasks.shares(loop):
            if not tasks.answer_late(loop, own_time(loop.thread) - began):
                began = own_time(loop.thread)
        tasks.count_block(own_time(loop.thread) - began)
        del tasks  # else it would never be collected
        time.sleep(POLL_S)


def own_time(thread: threading.Thread) -> float:
    """A clock in seconds that stands still while the thread waits for a core: on a busy machine that is not its code's fault."""
    try:
        queued_ns = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        queued_ns = 0
    return time.monotonic() - queued_ns / 1e9


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class Slots:
    """At most `limit` slots to run in, or any number if None; `async with` takes one."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.queued = 0
        """How many wait for a slot."""
        self.running = 0
        self._free = asyncio.Semaphore(limit) if limit else nullcontext()

    async def __aenter__(self) -> None:
        self.queued += 1
        try:
            await self._free.__aenter__()
        finally:
            self.queued -= 1
        self.running += 1

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.running -= 1
        await self._free.__aexit__(kind, error, trace)


def make_slots(config: ConcurrencyConfig | None) -> Slots:
    return Slots(config.max_concurrent if config else None)


def _is_gateway_fault(error: BaseException) -> bool:
    try:
        # OpenAI's client has the code as an attribute; Anthropic's leaves it in the body, where its dialect puts it.
        code = getattr(error, "code", None) or getattr(error, "body", {})["error"]["details"]["error_code"]
        return str(code) in GATEWAY_FAULT_CODES
    except Exception:  # an author's error may have any attributes
        return False


def _chain(error: BaseException | None, max_length: int = 16) -> Iterator[BaseException]:
    while error is not None and max_length:
        yield error
        error, max_length = error.__cause__ or error.__context__, max_length - 1
