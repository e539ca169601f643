"""The rollout source of a trainer whose rollouter is another process."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from penstock.errors import TrainError
from penstock.events import Events
from penstock.records import BranchPoint
from penstock.scale.actor_calls import MAX_DEATHS, Actor, ActorGone, call_result, wait_restarted
from penstock.scale.package import ray


class RemoteRollouts:
    """A `RolloutSource` over an AsyncRollouter. After a restart, the rollouter gets the current weights and continues.

    Rollouts of the dead one are in the pool without an end; the next one's scheduler makes new attempts at them.
    """

    def __init__(self, rollouter: Actor, synchronizer: Actor, events: Events) -> None:
        self._rollouter, self._synchronizer, self._events = rollouter, synchronizer, events
        self._steps_trained = 0
        self._served: tuple[int, Path] | None = None
        self._publishing = asyncio.Lock()
        self._stopped = False
        self._deaths = 0

    async def begin(self) -> None:
        """Start with a rollouter that has nothing under way."""
        await self._until(lambda: self._call("begin"))

    async def run(self) -> None:
        self._stopped = False
        await self._until(lambda: self._call("run", self._steps_trained, self._version))

    def advance(self, steps_trained: int) -> None:
        self._deaths = self._deaths if steps_trained == self._steps_trained else 0
        self._steps_trained = steps_trained
        self._rollouter.advance.remote(steps_trained)  # if it is dead now, `run` passes it on after the restart

    def stop(self) -> None:
        self._stopped = True
        self._rollouter.stop.remote()

    async def evaluate(self) -> list[str]:
        return await self._until(lambda: self._call("evaluate", self._version), even_if_stopped=True)

    async def branch(self, points: Sequence[BranchPoint]) -> list[str]:
        asked = [(point.rollout_id, point.step) for point in points]
        return await self._until(lambda: self._call("branch", asked, self._version))

    async def load(self, version: int, folder: Path) -> None:
        async with self._publishing:
            self._served = (version, folder)
            await self._publish()

    def resting(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()  # learner and engine have GPUs of their own

    @property
    def _version(self) -> int:
        return self._served[0] if self._served else 0

    async def _publish(self) -> None:
        if self._served is not None:
            version, folder = self._served
            await call_result(self._synchronizer.publish.remote(version, str(folder)))

    async def _until(self, call: Callable[[], Awaitable[Any]], *, even_if_stopped: bool = False) -> Any:
        """Returns the result of `call` from a rollouter that has the current weights, across its restarts."""
        while True:
            try:
                result = await call()
                if result is not None and result is not False:  # else it lacks the current weights
                    return result
            except ActorGone as gone:
                if self._stopped and not even_if_stopped:
                    return None
                self._count(gone)
                await wait_restarted(self._rollouter)
            async with self._publishing:
                await self._publish()

    def _count(self, gone: Exception) -> None:
        self._deaths += 1
        reason = str(gone).splitlines()[0]
        self._events.emit("rollouter.lost", message=reason, in_a_row=self._deaths)
        if self._deaths > MAX_DEATHS:
            raise TrainError(f"the rollouter died {self._deaths} times without a step of training: {reason}; see Ray's logs")

    async def _call(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._rollouter, method).remote(*arguments)
        try:
            return await call_result(call)
        except asyncio.CancelledError:
            ray.cancel(call)
            raise
