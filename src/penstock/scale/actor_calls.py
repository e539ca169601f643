"""Calls of Ray actors: their errors come back as they were raised, and their events are fetched in batches."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, cast

from penstock.errors import PenstockError
from penstock.events import Events
from penstock.scale.package import RayActorError, RayTaskError, ray

Actor = Any
"""A handle of one of our actors: `handle.method.remote(…)` is awaitable."""

ActorGone = RayActorError
"""The process of an actor died or cannot be reached; once restarted, it answers the next call."""


RESTART_S = 180.0
"""How long the restart of an actor that died may take."""
_RETRY_S = 0.2
MAX_DEATHS = 3
"""How often an actor may die, with no progress in between, before the run is given up."""


def get_actor(name: str) -> Actor:
    """Returns the actor of that name in this run's namespace. A name outlives a restart of whoever holds it; a handle does not."""
    return cast("Actor", ray.get_actor(name))


async def call_result(call: Awaitable[Any]) -> Any:
    """Returns the result of a call. A PenstockError is raised with its own type and message, without Ray's traceback in it."""
    try:
        return await call
    except RayTaskError as error:
        cause: Any = getattr(error, "cause", None)
        if isinstance(cause, PenstockError):
            raise cause from None
        raise


async def wait_restarted(actor: Actor) -> None:
    """Wait until an actor that died is restarted: meanwhile Ray fails every call. ActorGone if that takes too long."""
    deadline = asyncio.get_running_loop().time() + RESTART_S
    while True:
        try:
            await call_result(actor.ready.remote())
            return
        except ActorGone:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(_RETRY_S)


class ItemQueue:
    """Items of an actor that one reader polls; they wait in order until they are fetched."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._filled = asyncio.Event()

    def put(self, item: Any) -> None:
        """Add an item; call it from the actor's event loop."""
        self._items.append(item)
        self._filled.set()

    async def take(self) -> list[Any]:
        """Returns all items; waits for the first."""
        await self._filled.wait()
        return self.rest()

    def rest(self) -> list[Any]:
        """Returns all items without waiting."""
        items, self._items = self._items, []
        self._filled.clear()
        return items


class EventBuffer:
    """The events of an actor, for the driver to fetch: the driver has the event log and the listeners."""

    def __init__(self) -> None:
        self.events = Events()
        self._queue = ItemQueue()

    def open(self) -> None:
        """Start to buffer events; call it within the actor's event loop. Threads may emit events too."""
        loop = asyncio.get_running_loop()

        def put(kind: str, fields: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self._queue.put, _frame(kind, fields))

        self.events.listen(put)

    async def take(self) -> list[bytes]:
        """Returns the events since the last call; waits for the first. An empty frame is the last one."""
        return await self._queue.take()

    def close(self) -> None:
        """Mark the end of the events."""
        asyncio.get_running_loop().call_soon(self._queue.put, b"")


def _frame(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps([kind, fields], default=str).encode()


async def relay_events(actor: Actor, events: Events) -> None:
    """Emit an actor's events here until their end."""
    while True:
        try:
            frames: list[bytes] = await call_result(actor.take_events.remote())
        except ActorGone:  # it is being restarted, or `supervise` gives it up
            await asyncio.sleep(_RETRY_S)
            continue
        for frame in frames:
            if not frame:
                return
            kind, fields = json.loads(frame)
            events.emit(kind, **fields)
