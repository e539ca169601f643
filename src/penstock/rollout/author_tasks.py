"""Runs authors' coroutines in our event loop: none outlives its deadline, hangs the run or takes it down."""

import asyncio
import contextvars
import ctypes
import reprlib
import threading
import traceback
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from penstock.errors import EngineError, PenstockError, WorkerLost
from penstock.events import Events
from penstock.rollout.loop_watchdog import HELD_REMEDY, AuthorWork, BlockedLoop, LoopWatchdog
from penstock.sdk.workflow import ConcurrencyConfig
from penstock.system.async_tools import leaf_errors, retrieve_exception

T = TypeVar("T")

GATEWAY_FAULT_CODES = frozenset({"engine_error", "engine_busy", "not_recorded", "internal_error"})
"""Error codes that say that a call failed on the gateway's side, not the caller's."""

_MAX_MESSAGE_CHARS = 500


class AuthorTasks:
    """Runs the author's coroutines. `home` is the author's folder: an error is reported with the last line in it.

    Work that blocked the loop too long runs in a thread of its own from then on, by its name `what`; `watchdog` finds it.
    """

    def __init__(self, home: Path, events: Events, *, grace_s: float = 5.0, watchdog: LoopWatchdog | None = None) -> None:
        self.abandoned = 0
        """How many did not end after their cancellation."""
        self._watchdog = watchdog
        self._in_threads: set[str] = set()
        self._home = home.resolve()
        self._events = events
        self._grace_s = grace_s
        self._abandoned_tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T], *, error: type[PenstockError], what: str, timeout_s: float) -> T:
        """Returns what `work` returns. Whatever it raises becomes `error`, or EngineError if the gateway was at fault.

        Raises TimeoutError past the deadline, and WorkerLost if it was broken off because it blocked the loop: it may be run
        again. Late or cancelled work gets `grace_s` to end and is then abandoned. `what` names the work in error messages.
        """
        watched = None
        if what in self._in_threads:
            work = run_in_thread(work)
        elif self._watchdog is not None:
            watched = AuthorWork(what, timeout_s, self._watchdog)
        # `asyncio.wait` instead of `asyncio.timeout`: the author's code may swallow its cancellation, and we must not wait on.
        task = asyncio.create_task(self._run_named(work, error, what, watched))
        task.add_done_callback(retrieve_exception)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            late = not task.done()
        finally:
            if not task.done():
                await self._cancel(task, what)
        if watched is not None and watched.held:
            raise error(f"{what}: kept the interpreter to itself at {watched.blocked}; {HELD_REMEDY}")
        if watched is not None and watched.blocked:
            self._move_to_thread(watched)
        if late:
            raise TimeoutError
        if task.cancelled():
            raise error(f"{what}: cancelled itself; let it raise an error or return")
        return task.result()

    async def _run_named(
        self, work: Coroutine[Any, Any, T], error: type[PenstockError], what: str, watched: AuthorWork | None
    ) -> T:
        try:
            with watched.watchdog.watching(watched) if watched else nullcontext():
                return await work
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise
        except SystemExit as cause:
            raise error(f"{what}: called sys.exit({reprlib.repr(cause.code)}); return or raise an error instead") from cause
        except BaseException as cause:  # the author's code: anything may come, and it ends this rollout alone
            leaf = next(leaf_errors(cause))
            kind = EngineError if any(map(_is_gateway_fault, _chain(leaf))) else error
            raise kind(f"{what}: {self._describe(leaf)}") from cause

    def _move_to_thread(self, work: AuthorWork) -> None:
        """Runs such work in threads from now on; WorkerLost if this one was broken off."""
        if work.what not in self._in_threads:
            self._in_threads.add(work.what)
            text = f"{work.what} blocked the event loop too long: from now on each runs in a thread and a loop of its own"
            self._events.emit("loop.moved", what=work.what, where=work.blocked, text=text)
        if work.broken_off:
            raise WorkerLost(f"{work.what}: blocked the event loop at {work.blocked}; it is made again in a thread of its own")

    def _describe(self, cause: BaseException) -> str:
        lines = [(Path(frame.f_code.co_filename), number) for frame, number in traceback.walk_tb(cause.__traceback__)]
        own = [(file.name, number) for file, number in lines if self._home in file.parents and "site-packages" not in file.parts]
        return one_line(cause) + (f" ({own[-1][0]}, line {own[-1][1]})" if own else "")

    async def _cancel(self, task: asyncio.Task[Any], what: str) -> None:
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=self._grace_s)
        finally:
            if not task.done():
                self._abandon(task, what)

    def _abandon(self, task: asyncio.Task[Any], what: str) -> None:
        """Breaks off a task that swallowed its cancellation, so that neither this run nor the loop's shutdown waits for it."""
        self.abandoned += 1
        self._events.emit("guest.abandoned", what=what, grace_s=self._grace_s)
        self._abandoned_tasks.add(task)  # asyncio itself holds tasks by weak references only
        task.add_done_callback(self._abandoned_tasks.discard)
        frames = list(_awaited(task.get_coro()))
        try:
            task.get_coro().close()  # raises GeneratorExit inside, which only a bare `except` swallows
        except Exception:  # it did, or raised another error: unregister it, or `asyncio.run` waits for it at the end
            asyncio.tasks._unregister_task(task)  # pyright: ignore[reportPrivateUsage]
            for each in frames:  # never to be collected: each would swallow that too, and Python would print a traceback
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        task.cancel()


async def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` in a thread and an event loop of its own. If that blocks, whoever waits here can still leave.

    A cancellation is passed on. The thread is a daemon: one that never ends does not keep the process.
    """
    result, inner = Future[T](), list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]()

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in a task
        inner.append((asyncio.get_running_loop(), task))
        return await work

    def run() -> None:
        with suppress(InvalidStateError):  # abandoned: nobody waits for the result
            try:
                value = asyncio.run(main())
            except BaseException as error:  # raised where the result is awaited
                result.set_exception(error)
            else:
                result.set_result(value)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True, name="penstock-author")
    thread.start()
    waiting = asyncio.wrap_future(result)
    try:
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            for loop, task in inner:
                with suppress(RuntimeError):  # its loop is closed: it has just ended
                    loop.call_soon_threadsafe(task.cancel)
            return await waiting
    except GeneratorExit:  # abandoned: ends a loop in Python; a call that blocks in the system stays until it returns
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(BlockedLoop))
        raise


def _awaited(coroutine: object) -> Iterator[object]:
    """The coroutine, the one that it awaits, and so on."""
    while coroutine is not None:
        yield coroutine
        coroutine = getattr(coroutine, "cr_await", None)


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


def one_line(cause: BaseException) -> str:
    """Returns an error as one short line of valid UTF-8, for any store and terminal."""
    if isinstance(cause, PenstockError):
        text = str(cause)
    else:
        try:
            text = f"{type(cause).__name__}: {str(cause) or 'no message'}"
        except Exception:  # an author's error may fail even at this
            text = f"{type(cause).__name__}: its message cannot be shown"
    text = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}…"


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
