"""Asyncio helpers that several rooms need."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

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
