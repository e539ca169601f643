"""A connection as the pools' SQL sees it: the same statements for SQLite and PostgreSQL, with what differs named here."""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import orjson

from penstock.pool.base import Kind

BUSY_S = 30.0
"""How long another process may hold a SQLite file before it is said to be in use."""
LOOK_S = 0.0003
"""How long one that waits for such a file pauses between two looks."""


class CounterRow(NamedTuple):
    """A change of a running count: added to it, except that a `top` keeps the highest."""

    kind: str
    name: str
    n: int


class Cursor(Protocol):
    """What a statement gave."""

    @property
    def rowcount(self) -> int:
        """How many rows it changed."""
        ...

    def fetchone(self) -> Any:
        """The next row; None after the last."""
        ...

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """One connection, used by one thread at a time. `?` stands for a value."""

    LOCK: ClassVar[str]
    """What a SELECT ends with so that the rows it read stay as they are until the transaction ends."""
    SETTLED: ClassVar[str]
    """A condition on rows of `changes` before which no other will appear any more."""
    SKIP: ClassVar[str]
    """The same, leaving out rows that another transaction has locked."""
    ERRORS: ClassVar[tuple[type[Exception], ...]]
    """What a statement raises."""

    @property
    def in_transaction(self) -> bool:
        """Whether there is something to commit or roll back."""
        ...

    def begin(self) -> None:
        """Begin a transaction that writes."""
        ...

    def begin_reading(self) -> None:
        """Begin a transaction whose queries all see the same moment."""
        ...

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Cursor:
        """Carry out one statement."""
        ...

    def rows(self, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[list[Any]]:
        """`SELECT columns rest`, all rows at once; columns of text and integers only."""
        ...

    def alone(self, what: str) -> None:
        """Wait until no other transaction is at `what`, and keep it out until this one ends."""
        ...

    def count(self, channel: str, changes: Iterable[CounterRow]) -> None:
        """Keep the running counts of a channel in step with what was written, in one statement."""
        ...

    def tell(self, changes: Iterable[tuple[Kind, str, str]]) -> None:
        """Write down what happened, as kind, channel and id, for those who follow it."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


class SqliteDatabase(sqlite3.Connection):
    """One writer at a time has the whole file, so nothing else needs a lock."""

    LOCK: ClassVar[str] = ""
    SKIP: ClassVar[str] = ""
    SETTLED: ClassVar[str] = "1 = 1"
    ERRORS: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error,)

    def begin(self) -> None:
        """See `Database.begin`. Where others write, this waits by itself: SQLite would pause ever longer between two looks."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                self.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as cause:
                if cause.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_S)

    def begin_reading(self) -> None:
        self.execute("BEGIN")

    def rows(self, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[list[Any]]:
        """See `Database.rows`. As one value: the interpreter's lock is given up and waited for with each row that SQLite gives."""
        query = f"SELECT json_group_array(json_array({', '.join(columns)})) {rest}"
        return orjson.loads(self.execute(query, values).fetchone()[0])

    def alone(self, what: str) -> None: ...

    def count(self, channel: str, changes: Iterable[CounterRow]) -> None:
        rows = [(channel, *change) for change in changes]
        self.execute(
            f"""INSERT INTO tally (channel, kind, name, n) VALUES {", ".join(["(?, ?, ?, ?)"] * len(rows))}
                ON CONFLICT DO UPDATE SET n = CASE kind WHEN 'top' THEN max(n, excluded.n) ELSE n + excluded.n END""",
            [value for row in rows for value in row],
        )

    def tell(self, changes: Iterable[tuple[Kind, str, str]]) -> None:
        """See `Database.tell`. One statement, as the interpreter's lock is given up and waited for with each."""
        rows = [value for change in changes for value in change]
        if rows:
            self.execute(f"INSERT INTO changes (kind, channel, id) VALUES {', '.join(['(?, ?, ?)'] * (len(rows) // 3))}", rows)
