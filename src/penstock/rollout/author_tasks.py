"""Authors' coroutines as guests of our event loop: none outlives its deadline, hangs the run or takes it down."""

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

T = TypeVar("T")

OUR_CODES = frozenset({"engine_error", "engine_busy", "not_recorded", "internal_error"})
"""Codes by which the gateway says that a call failed on its side, not the caller's."""

_LONGEST = 500


class AuthorTasks:
    """Runs what an author wrote. `home` is the author's folder: an error is reported with the last line in it."""

    def __init__(self, home: Path, events: Events, *, grace_s: float = 5.0) -> None:
        self.abandoned = 0
        """How many would not leave when asked to."""
        self._home = home.resolve()
        self._events = events
        self._grace_s = grace_s
        self._left: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T], *, error: type[PenstockError], what: str, timeout_s: float) -> T:
        """What `work` gives. Whatever it raises becomes `error`, or EngineError where the gateway took the blame.

        Raises TimeoutError past the deadline. Late or cancelled work gets `grace_s` to leave and is then abandoned.
        """
        guest = asyncio.create_task(self._named(work, error, what))
        guest.add_done_callback(_noted)
        try:
            await asyncio.wait({guest}, timeout=timeout_s)
            late = not guest.done()
        finally:
            if not guest.done():
                await self._dismiss(guest, what)
        if late:
            raise TimeoutError
        if guest.cancelled():
            raise error(f"{what}: cancelled itself; let it raise an error or return")
        return guest.result()

    async def _named(self, work: Coroutine[Any, Any, T], error: type[PenstockError], what: str) -> T:
        try:
            return await work
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise
        except SystemExit as cause:
            raise error(f"{what}: called sys.exit({reprlib.repr(cause.code)}); return or raise an error instead") from cause
        except BaseException as cause:  # the author's code: anything may come, and it ends this rollout alone
            leaf = next(leaves(cause))
            kind = EngineError if any(map(_is_ours, _chain(leaf))) else error
            raise kind(f"{what}: {self._told(leaf)}") from cause

    def _told(self, cause: BaseException) -> str:
        lines = [(Path(frame.f_code.co_filename), number) for frame, number in traceback.walk_tb(cause.__traceback__)]
        own = [(file.name, number) for file, number in lines if self._home in file.parents and "site-packages" not in file.parts]
        return one_line(cause) + (f" ({own[-1][0]}, line {own[-1][1]})" if own else "")

    async def _dismiss(self, guest: asyncio.Task[Any], what: str) -> None:
        guest.cancel()
        try:
            await asyncio.wait({guest}, timeout=self._grace_s)
        finally:
            if not guest.done():
                self._abandon(guest, what)

    def _abandon(self, guest: asyncio.Task[Any], what: str) -> None:
        """Break off a guest that swallowed its cancellation, so that neither this run nor the loop's shutdown waits for it."""
        self.abandoned += 1
        self._events.emit("guest.abandoned", what=what, grace_s=self._grace_s)
        self._left.add(guest)
        guest.add_done_callback(self._left.discard)
        try:
            guest.get_coro().close()  # GeneratorExit, which only a bare `except` swallows too
        except Exception:  # it did, or raised on its way out: the loop must forget it, or `asyncio.run` waits for it at the end
            asyncio.tasks._unregister_task(guest)  # pyright: ignore[reportPrivateUsage]
        guest.cancel()


def _noted(guest: asyncio.Task[Any]) -> None:
    """Look at what a guest raised, so that asyncio does not complain about one that was cancelled while it failed."""
    _ = guest.cancelled() or guest.exception()


class Slots:
    """Places for those that may run at once, `limit` of them, or any number; `async with` takes one."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.queued = 0
        """How many wait for one."""
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


def slots(limit: ConcurrencyConfig | None) -> Slots:
    """Places for as many as an author's config allows."""
    return Slots(limit.max_concurrent if limit else None)


def one_line(cause: BaseException) -> str:
    """An error as one short line that any store and terminal can take."""
    if isinstance(cause, PenstockError):
        text = str(cause)
    else:
        try:
            text = f"{type(cause).__name__}: {str(cause) or 'no message'}"
        except Exception:  # an author's error may fail even at this
            text = f"{type(cause).__name__}: its message cannot be shown"
    text = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside nested groups, first come first."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            yield from leaves(inner)  # pyright: ignore[reportUnknownArgumentType]
    else:
        yield error


def _is_ours(error: BaseException) -> bool:
    """OpenAI's clients have the code at hand; Anthropic's leave it in the body, where its dialect puts it."""
    try:
        code = getattr(error, "code", None) or getattr(error, "body", {})["error"]["details"]["error_code"]
        return str(code) in OUR_CODES
    except Exception:  # an author's error may have any attributes
        return False


def _chain(error: BaseException | None, longest: int = 16) -> Iterator[BaseException]:
    """An error and what led to it."""
    while error is not None and longest:
        yield error
        error, longest = error.__cause__ or error.__context__, longest - 1
