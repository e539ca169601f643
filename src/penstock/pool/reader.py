"""Threads that read: each read sees one moment of the database, and never holds up the writer."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from penstock.errors import PoolError
from penstock.pool.database import Database

T = TypeVar("T")


class Reader:
    """One thread per connection, so that a long report leaves one for the others."""

    def __init__(self, databases: Sequence[Database], explain: Callable[[Exception], Exception]) -> None:
        self._databases = databases
        self._explain = explain
        self._closed = False
        self._idle: SimpleQueue[Database] = SimpleQueue()
        for database in databases:
            self._idle.put(database)
        self._threads = ThreadPoolExecutor(len(databases), thread_name_prefix="penstock-pool-reader")

    async def run(self, read: Callable[[Database], T]) -> T:
        """What `read` returns; all its queries see the same state."""
        if self._closed:
            raise PoolError("the pool is closed; open it again")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, read)

    async def close(self) -> None:
        """Wait for running reads, then close the connections."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        for database in self._databases:
            database.close()

    def _read(self, read: Callable[[Database], T]) -> T:
        database = self._idle.get()
        try:
            database.begin_reading()
            return read(database)
        except Exception as cause:
            error = self._explain(cause)
            if error is cause:
                raise
            raise error from cause
        finally:
            with suppress(*database.ERRORS):  # where the connection broke just now, there is nothing left to end
                if database.in_transaction:
                    database.execute("ROLLBACK")
            self._idle.put(database)
