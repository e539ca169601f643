"""The controller's database: small, synchronous, durable at every commit. Each station of the controller owns its own tables."""

import sqlite3
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import ControllerError


class ControllerDatabase:
    """One connection behind a lock: a controller writes a few rows for each run, never a token."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        with self._told():
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
            self._connection.row_factory = sqlite3.Row
            try:
                for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                    self._connection.execute(f"PRAGMA {pragma}")
            except sqlite3.Error:
                self._connection.close()
                raise

    def close(self) -> None:
        """Give the file back."""
        self._connection.close()

    def create(self, *statements: str) -> None:
        """Make the tables of a station, each with IF NOT EXISTS."""
        with self.transaction():
            for statement in statements:
                self.write(statement)

    def write(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run one statement, durably unless a transaction is open; how many rows it changed."""
        with self._lock, self._told():
            return self._connection.execute(statement, values).rowcount

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """What a query finds."""
        with self._lock, self._told():
            return self._connection.execute(statement, values).fetchall()

    def row(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        """The first of what a query finds."""
        found = self.rows(statement, values)
        return found[0] if found else None

    @contextmanager
    def transaction(self) -> Generator[None]:
        """All that is written inside, or none of it."""
        with self._lock:
            self.write("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self.write("ROLLBACK")
                raise
            self.write("COMMIT")

    @contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as cause:
            text = f"the controller's database {self._path} cannot be used: {cause}"
            raise ControllerError(f"{text}; free disk space or set PENSTOCK_HOME", code="STORE_FAILED", status=503) from cause
