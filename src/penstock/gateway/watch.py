"""A watchdog over one request to an engine: silence that lasts too long ends it."""

import asyncio

from penstock.errors import EngineError


class Watch:
    """Cancels the task that it is made in when the engine is silent for too long; `beat` says that it is not."""

    def __init__(self, *, first_s: float, stall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stall_s = stall_s
        self._allowed_s = first_s
        self._last = self._loop.time()
        self._timer = self._loop.call_at(self._last + min(first_s, stall_s), self._look)  # one timer, whatever comes first
        self._barked = False
        self._began = self._last
        self.first_s: float | None = None
        """How long the engine took to say something; None while it has not."""

    def beat(self) -> None:
        """The engine has said something."""
        self._last = self._loop.time()
        if self.first_s is None:
            self.first_s = self._last - self._began
            self._allowed_s = self._stall_s

    def stop(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def stalled(self) -> EngineError | None:
        """Why the task was cancelled, if it was this watchdog that did; the cancellation is then taken back."""
        if not self._barked or self._task is None:
            return None
        self._task.uncancel()
        return EngineError(f"the engine was silent for {self._allowed_s:g} s; the call was given up")

    def _look(self) -> None:
        due = self._last + self._allowed_s
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look)
        elif self._task is not None:
            self._barked = True
            self._task.cancel()
