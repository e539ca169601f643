"""Wakes coroutines that wait for a change, in whatever event loop they run."""

import asyncio
import threading
from contextlib import suppress


class Notifier:
    """Counts notifications and wakes all waiters with each one. Any thread may notify."""

    def __init__(self) -> None:
        self.count = 0
        """Notifications so far; pass it to `wait_after`."""
        self._lock = threading.Lock()
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        with self._lock:
            self.count += 1
            waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            with suppress(RuntimeError):  # its loop is closed, so nobody waits there any more
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def wait_after(self, count: int, timeout_s: float) -> None:
        """Wait for a notification after the first `count`, at most `timeout_s` seconds.

        A caller reads `count` before it looks for changes, so that one in between is not missed.
        """
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.count > count:
                return
            self._waiters.add(waiter)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def close(self) -> None: ...


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
