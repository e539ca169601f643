"""Wakes those who wait for a change, in whatever event loop they wait."""

import asyncio
import threading
from contextlib import suppress


class Notifier:
    """Anyone may ring it, from any thread; whoever waits hears the next ring."""

    def __init__(self) -> None:
        self.heard = 0
        """How often it rang: what `ring_after` is asked to get past."""
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        with self._lock:
            self.heard += 1
            waiting, self._waiting = self._waiting, set()
        for each in waiting:
            with suppress(RuntimeError):  # its loop is closed: nobody waits there any more
                each.get_loop().call_soon_threadsafe(_wake, each)

    async def ring_after(self, heard: int, timeout_s: float) -> None:
        """Wait until it has rung more often than `heard`, but not longer than that."""
        waiting = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.heard > heard:
                return
            self._waiting.add(waiting)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiting
        finally:
            with self._lock:
                self._waiting.discard(waiting)

    def close(self) -> None:
        """Ring no more on its own."""


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)
