"""Writes that wait for their turn, and the kinds of them that can be carried out together."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.pool.database import Database

Write = Callable[[Database], Any]
"""Runs in a transaction. It may raise: then it has changed nothing."""


class Bulk(NamedTuple):
    """A kind of writes, of which several take few statements."""

    name: str
    one: Callable[[Database, Any], Any]
    """Writes one value."""
    together: Callable[[Database, list[Any]], bool]
    """Writes several; False where they must be written one by one, and then what it did is undone."""
    result: Any = None
    """Of each that is written so."""
    last: bool = False
    """Whether it comes after others that wait with it: no caller can tell their order, and alike ones shall be neighbours."""


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A write, or a value of a kind of them, and what came of it."""

    write: Write | None = None
    bulk: Bulk | None = None
    value: Any = None
    result: Any = None
    error: Exception | None = None

    def carry_out(self, database: Database) -> Any:
        """This one alone."""
        if self.bulk is not None:
            return self.bulk.one(database, self.value)
        assert self.write is not None, "it is one of the two"
        return self.write(database)


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting(Job):
    """One that a coroutine waits for."""

    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    settled: bool = False

    async def outcome(self) -> Any:
        """Its result. It is carried out even if the one who waits is cancelled; the cancellation goes on once it is done."""
        try:
            return await self.done
        except asyncio.CancelledError:
            if not self.settled:
                self.done = asyncio.get_running_loop().create_future()
                await asyncio.wait({self.done})
                self.done.exception()  # it is the cancellation that goes on
            raise

    def settle(self) -> None:
        """Tell the one who waits, on its own loop."""
        self.settled = True
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)
