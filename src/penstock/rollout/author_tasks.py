"""Runs authors' coroutines in our event loop: none outlives its deadline, hangs the run or takes it down."""

import asyncio
import reprlib
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from penstock.errors import EngineError, PenstockError
from penstock.events import Events
from penstock.sdk.workflow import ConcurrencyConfig
from penstock.system.async_tools import leaf_errors

T = TypeVar("T")

GATEWAY_FAULT_CODES = frozenset({"engine_error", "engine_busy", "not_recorded", "internal_error"})
"""Error codes that say that a call failed on the gateway's side, not the caller's."""

_MAX_MESSAGE_CHARS = 500


class AuthorTasks:
    """Runs the author's coroutines. `home` is the author's folder: an error is reported with the last line in it."""

    def __init__(self, home: Path, events: Events, *, grace_s: float = 5.0) -> None:
        self.abandoned = 0
        """How many did not end after their cancellation."""
        self._home = home.resolve()
        self._events = events
        self._grace_s = grace_s
        self._abandoned_tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T], *, error: type[PenstockError], what: str, timeout_s: float) -> T:
        """Returns what `work` returns. Whatever it raises becomes `error`, or EngineError if the gateway was at fault.

        Raises TimeoutError past the deadline. Late or cancelled work gets `grace_s` to end and is then abandoned. `what` names
        the work in error messages.
        """
        # `asyncio.wait` instead of `asyncio.timeout`: the author's code may swallow its cancellation, and we must not wait on.
        task = asyncio.create_task(self._run_named(work, error, what))
        task.add_done_callback(_retrieve_exception)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            late = not task.done()
        finally:
            if not task.done():
                await self._cancel(task, what)
        if late:
            raise TimeoutError
        if task.cancelled():
            raise error(f"{what}: cancelled itself; let it raise an error or return")
        return task.result()

    async def _run_named(self, work: Coroutine[Any, Any, T], error: type[PenstockError], what: str) -> T:
        try:
            return await work
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
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
        try:
            task.get_coro().close()  # raises GeneratorExit inside, which only a bare `except` swallows
        except Exception:  # it did, or raised another error: unregister it, or `asyncio.run` waits for it at the end
            asyncio.tasks._unregister_task(task)  # pyright: ignore[reportPrivateUsage]
        task.cancel()


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    # asyncio logs "exception was never retrieved" for a task that failed while it was cancelled.
    _ = task.cancelled() or task.exception()


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
