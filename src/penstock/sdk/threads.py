"""Threads that code of a rollout starts belong to that rollout: its context goes with the work, into pools and new threads alike.

asyncio hands its context to tasks and to `to_thread`, but Python hands none to `threading.Thread`, `ThreadPoolExecutor.submit` or
`run_in_executor`. A call made there would lose its rollout, or, in a pooled thread, be taken for another's.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any


def carry_contexts() -> None:
    """From now on, threads and thread pools of this process run their work in the context of whoever asked for it."""
    if threading.Thread.start.__module__ != __name__:
        setattr(threading.Thread, "start", _carrying_start(threading.Thread.start))  # noqa: B010
        setattr(ThreadPoolExecutor, "submit", _carrying_submit(ThreadPoolExecutor.submit))  # noqa: B010


def _carrying_start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def carrying(self: threading.Thread) -> None:
        run, context = self.run, copy_context()

        def inside() -> None:
            vars(self).pop("run", None)  # what is put over the class's own below, so that the thread does not hold itself
            context.run(run)

        self.run = inside
        start(self)

    return carrying


def _carrying_submit(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def carrying(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # The pool's own threads, which outlive this work, start in an empty context: they belong to nobody.
        return Context().run(submit, self, copy_context().run, fn, *args, **kwargs)

    return carrying
