"""The embedded pool: one SQLite file, `pool.db` in the run folder."""

import sqlite3
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

from penstock.errors import PoolError
from penstock.pool.base import CheckProgress
from penstock.pool.check import PoolCheck, check_file
from penstock.pool.rules import Clock, LeaseClock
from penstock.pool.sql.pool import SqlPool
from penstock.pool.sql.sqlite import FAULTS, SqliteDatabase, explain, is_busy, migrate, open_database, open_read_only

READERS = 2
"""Connections for reading, so that a long report leaves one for the others."""
EXCLUSIVE_S = 2.0
"""How long `compact` waits for other processes to close the file."""


class SqlitePool(SqlPool):
    """Opens `folder/pool.db`, and creates it if needed. `max_pages` bounds the file, in pages of 8 KiB.

    `writer_address` is that of a process that writes for this one and others; see `open_writer_process`.
    """

    name: ClassVar[str] = "sqlite"
    has_writer_process: ClassVar[bool] = True

    def __init__(
        self,
        folder: Path,
        *,
        url: str = "",
        writer_address: str = "",
        clock: Clock = time.monotonic,
        max_pages: int | None = None,
    ) -> None:
        self.check_url(url)
        path = pool_file(folder)
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                writing = stack.enter_context(closing(open_database(path, max_pages=max_pages)))
                migrate(writing)
                writing.execute("PRAGMA busy_timeout = 0")  # `SqliteDatabase.begin` waits by itself, nothing else has to
                reading = [stack.enter_context(closing(open_database(path))) for _ in range(READERS)]
                explained = partial(explain, path=path)
                super().__init__(writing, reading, LeaseClock(clock), explained, writer_address=writer_address)
            except FAULTS as cause:
                raise explain(cause, path) from cause
            stack.pop_all()

    @classmethod
    def why_unreadable(cls, folder: Path) -> str | None:
        if not pool_file(folder).exists():
            return "this run has no pool.db yet, so there is nothing to read; start it first"
        if cls.size_bytes(folder, "") == 0:
            return "its pool.db is empty, so there is nothing to read; restore a copy"
        return None

    @classmethod
    def size_bytes(cls, folder: Path, url: str) -> int | None:
        files = (pool_file(folder), folder / "pool.db-wal")
        return sum(file.stat().st_size for file in files if file.exists())

    @classmethod
    @contextmanager
    def reading(cls, folder: Path, url: str) -> Generator[SqliteDatabase]:
        path = pool_file(folder)
        try:
            with open_read_only(path) as database:
                database.begin_reading()
                yield database
        except FAULTS as cause:
            raise explain(cause, path) from cause

    @classmethod
    def verify(cls, folder: Path, url: str, progress: CheckProgress) -> PoolCheck:
        return check_file(pool_file(folder), progress)

    @classmethod
    def compact(cls, folder: Path) -> None:
        path = pool_file(folder)
        try:
            with closing(open_database(path)) as database:
                database.execute(f"PRAGMA busy_timeout = {int(EXCLUSIVE_S * 1000)}")
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                _leave_wal(database, path)
                try:
                    database.execute("VACUUM")
                finally:
                    database.execute("PRAGMA journal_mode = WAL").fetchone()
        except FAULTS as cause:
            raise explain(cause, path) from cause


def pool_file(folder: Path) -> Path:
    return folder / "pool.db"


def _leave_wal(database: sqlite3.Connection, path: Path) -> None:
    """Switch off the write-ahead log. SQLite grants that only if no other process has the file open."""
    try:
        mode: str = database.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    except sqlite3.OperationalError as cause:
        if not is_busy(cause):
            raise
        mode = "wal"
    if mode != "delete":
        raise PoolError(f"{path}: another process has it open; stop the training, gateway or report that reads it, then compact")
