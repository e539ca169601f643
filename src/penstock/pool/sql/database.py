"""A database connection as the pools' SQL uses it: what SQLite and PostgreSQL do differently has a name here."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from penstock.pool.base import ChangeKind


class CounterChange(NamedTuple):
    """A change of a running count: `n` is added; a counter of kind `top` keeps the highest `n` instead."""

    kind: str
    name: str
    n: int


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class PoolDatabase(Protocol):
    """One connection, used by one thread at a time. Statements take values for `?`."""

    LOCK: ClassVar[str]
    """Suffix of a SELECT that locks the rows read until the transaction ends."""
    SKIP: ClassVar[str]
    """The same, but leaves out rows that another transaction has locked."""
    SETTLED: ClassVar[str]
    """Condition on rows of `changes`: no row with an earlier position can still appear."""
    ERRORS: ClassVar[tuple[type[Exception], ...]]
    """What a statement raises."""

    @property
    def in_transaction(self) -> bool: ...

    def begin(self) -> None:
        """Begin a transaction that writes."""
        ...

    def begin_reading(self) -> None:
        """Begin a transaction whose queries all see the same snapshot."""
        ...

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Cursor: ...

    def select(self, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[list[Any]]:
        """Run `SELECT columns rest` and return all rows; for columns of text and integers only."""
        ...

    def lock(self, name: str) -> None:
        """Wait until no other transaction holds the lock `name`, and hold it until this one ends."""
        ...

    def add_counts(self, channel: str, changes: Iterable[CounterChange]) -> None:
        """Update the running counts of a channel, in one statement."""
        ...

    def log_changes(self, changes: Iterable[tuple[ChangeKind, str, str]]) -> None:
        """Append to the change log; each change is a kind, a channel and an id."""
        ...

    def close(self) -> None: ...
