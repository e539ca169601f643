"""The embedded pool: one SQLite file."""

import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from penstock.errors import ConfigError
from penstock.pool.base import Pool
from penstock.pool.leases import Clock, LeaseClock
from penstock.pool.sql.pool import SqlPool
from penstock.pool.sqlite_file import FAULTS, explain, migrate, open_database

READERS = 2
"""Connections that read: a long report leaves one for the others."""


def open_pool(
    folder: Path, *, url: str = "", scribe: str = "", clock: Clock = time.monotonic, max_pages: int | None = None
) -> Pool:
    """The pool in `folder/pool.db`, made where there is none. `max_pages` bounds the file, in pages of 8 KiB.

    `scribe` is the address of a process that writes for this one and others; see `open_scribe`.
    """
    if url:
        raise ConfigError("pool.url has no meaning for pool.name = 'sqlite', which is a file of the run folder; leave it out")
    path = folder / "pool.db"
    with ExitStack() as opened:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writing = opened.enter_context(closing(open_database(path, max_pages=max_pages)))
            migrate(writing)
            writing.execute("PRAGMA busy_timeout = 0")  # `begin` waits, and nothing else has to
            reading = [opened.enter_context(closing(open_database(path))) for _ in range(READERS)]
            pool = SqlPool(writing, reading, LeaseClock(clock), partial(explain, path=path), scribe=scribe)
        except FAULTS as cause:
            raise explain(cause, path) from cause
        opened.pop_all()
    return pool
