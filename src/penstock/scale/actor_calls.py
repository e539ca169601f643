"""Calls of actors: what they raise comes back as it was raised, and what they have to tell is fetched in bunches."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, cast

from penstock.errors import PenstockError
from penstock.events import Events
from penstock.scale.package import RayActorError, RayTaskError, ray

Actor = Any
"""A handle of one of our actors: `handle.method.remote(…)` is an awaitable answer."""

ActorGone = RayActorError
"""The process of an actor died, or cannot be reached; a restarted one answers the next call."""


RESTART_S = 180.0
"""How long an actor that died may take to be started anew."""
_RETRY_S = 0.2
MAX_DEATHS = 3
"""How often an actor may die, with no progress in between, before the run is given up."""


def get_actor(name: str) -> Actor:
    """The actor of that name in this run's namespace. A name can be given to an actor that is started anew; a handle gets lost."""
    return cast("Actor", ray.get_actor(name))


async def call_result(call: Awaitable[Any]) -> Any:
    """What a call of an actor gives. An error of ours is raised with its own type and message, without Ray's traceback in it."""
    try:
        return await call
    except RayTaskError as error:
        cause: Any = getattr(error, "cause", None)
        if isinstance(cause, PenstockError):
            raise cause from None
        raise


async def wait_restarted(actor: Actor) -> None:
    """Wait until an actor that died is there again: meanwhile Ray fails every call of it. ActorGone where it does not come."""
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
    """What an actor has to tell one who asks again and again. Items wait until they are fetched, in order."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._filled = asyncio.Event()

    def put(self, item: Any) -> None:
        """Add one; from the actor's own event loop."""
        self._items.append(item)
        self._filled.set()

    async def take(self) -> list[Any]:
        """All that there is; waits for the first."""
        await self._filled.wait()
        return self.rest()

    def rest(self) -> list[Any]:
        """All that there is, at once."""
        items, self._items = self._items, []
        self._filled.clear()
        return items


class EventBuffer:
    """The events of an actor, for the driver to fetch: it has the log, and whoever listens."""

    def __init__(self) -> None:
        self.events = Events()
        self._outbox = ItemQueue()

    def open(self) -> None:
        """From now on, events are kept; from within the actor's event loop. Threads may emit them too."""
        loop = asyncio.get_running_loop()

        def tell(kind: str, fields: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self._outbox.put, _frame(kind, fields))

        self.events.listen(tell)

    async def told(self) -> list[bytes]:
        """What happened since the last call; waits for the first. An empty one is the last."""
        return await self._outbox.take()

    def close(self) -> None:
        """Nothing more will be told."""
        asyncio.get_running_loop().call_soon(self._outbox.put, b"")


def _frame(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps([kind, fields], default=str).encode()


async def relay_events(actor: Actor, events: Events) -> None:
    """Emit here what an actor tells, until it says that this was all."""
    while True:
        try:
            frames: list[bytes] = await call_result(actor.told.remote())
        except ActorGone:  # restarted, or given up by whoever waits for its answer
            await asyncio.sleep(_RETRY_S)
            continue
        for frame in frames:
            if not frame:
                return
            kind, fields = json.loads(frame)
            events.emit(kind, **fields)
