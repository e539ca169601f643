"""The controller's SQLite database: synchronous and durable at every commit. Each component creates its own tables."""

import sqlite3
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import ControllerError


class ControllerDatabase:
    """One connection behind a lock. That is enough: a controller writes a few rows per run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        with self._translate_errors():
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
            self._connection.row_factory = sqlite3.Row
            try:
                for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                    self._connection.execute(f"PRAGMA {pragma}")
            except sqlite3.Error:
                self._connection.close()
                raise

    def close(self) -> None:
        self._connection.close()

    def create(self, *statements: str) -> None:
        """Runs the CREATE statements of a component, each with IF NOT EXISTS."""
        with self.transaction():
            for statement in statements:
                self.write(statement)

    def add_column(self, table: str, column: str) -> None:
        """Adds a column to a table that an older version created; `column` is its name and type."""
        with self.transaction():
            if column.split()[0] not in {row["name"] for row in self.rows(f"PRAGMA table_info({table})")}:
                self.write(f"ALTER TABLE {table} ADD COLUMN {column}")

    def write(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Runs one statement and returns the number of changed rows. It commits at once unless a transaction is open."""
        with self._lock, self._translate_errors():
            return self._connection.execute(statement, values).rowcount

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._lock, self._translate_errors():
            return self._connection.execute(statement, values).fetchall()

    def row(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        """Returns the first row of a query, or None."""
        found = self.rows(statement, values)
        return found[0] if found else None

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Commits everything written inside, or rolls it all back. Holds the lock, so other threads wait."""
        with self._lock:
            self.write("BEGIN IMMEDIATE")  # takes the write lock now: a later upgrade from a read lock could fail with SQLITE_BUSY
            try:
                yield
            except BaseException:
                self.write("ROLLBACK")
                raise
            self.write("COMMIT")

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            yield
        except sqlite3.IntegrityError:  # a broken constraint is the caller's error, not the database's
            raise
        except sqlite3.Error as cause:
            text = f"the controller's database {self._path} cannot be used: {cause}"
            raise ControllerError(f"{text}; free disk space or set PENSTOCK_HOME", code="STORE_FAILED", status=503) from cause
