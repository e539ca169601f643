"""How the pools' SQL stores and finds single rows of a rollout."""

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from penstock.pool import rules
from penstock.pool.rows import Row, column_names
from penstock.pool.sql.database import CounterRow, Database
from penstock.records import End, Grade, Node, Step

T = TypeVar("T")

MANY = 1000
"""SQLite takes 32,766 values to a statement, PostgreSQL twice as many."""


def _insert(table: str, kind: type[Any]) -> str:
    names = ["rollout_id", "id", *column_names(kind)]
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' for _ in names)}) ON CONFLICT DO NOTHING"


_TABLES: dict[str, type[Any]] = {"nodes": Node, "steps": Step, "grades": Grade}
_INSERTS = {table: _insert(table, kind) for table, kind in _TABLES.items()}
_READS = {
    table: f"SELECT {', '.join(column_names(kind))} FROM {table} WHERE rollout_id = ? AND id = ?" for table, kind in _TABLES.items()
}


class Running(NamedTuple):
    """What a write to a rollout needs to know of it."""

    channel: str
    oldest: int | None


def running(database: Database, rollout_id: str, name: str) -> Running:
    """The rollout that `name` is to be written to, which must not have ended."""
    query = f"SELECT ended, channel, oldest FROM rollouts WHERE id = ?{database.LOCK}"
    row = database.execute(query, (rollout_id,)).fetchone()
    if row is None:
        raise rules.unknown_rollout(rollout_id)
    if row[0] is not None:
        raise rules.too_late(name, End(row[0]))
    return Running(row[1], row[2])


def has(database: Database, table: str, rollout_id: str, key: int) -> bool:
    """Whether a step or node is stored."""
    return database.execute(f"SELECT 1 FROM {table} WHERE rollout_id = ? AND id = ?", (rollout_id, key)).fetchone() is not None


def put(database: Database, table: str, key: tuple[str, Any], row: Row, name: str) -> bool:
    """Insert a row; False where the very same is there, PoolError where another is."""
    cursor = database.execute(_INSERTS[table], (*key, row.record, *row.columns, row.crc))
    if cursor.rowcount:
        return True
    if database.execute(_READS[table], key).fetchone() != (row.record, *row.columns, row.crc):
        raise rules.differs(name)
    return False


def put_all(database: Database, table: str, rows: list[tuple[tuple[str, Any], Row]]) -> bool:
    """Insert rows; False where one of them, whatever its content, was there."""
    if not rows:
        return True
    values = [value for key, row in rows for value in (*key, row.record, *row.columns, row.crc)]
    return database.execute(_insert_many(table, len(rows)), values).rowcount == len(rows)


@cache
def _insert_many(table: str, rows: int) -> str:
    head, _, one = _INSERTS[table].partition(" VALUES ")
    values, _, conflict = one.partition(" ON ")
    return f"{head} VALUES {', '.join([values] * rows)} ON {conflict}"


@cache
def _count_of(table: str, keys: int) -> str:
    """A join, as SQLite would look through the whole table for `(rollout_id, id) IN …`."""
    first, rest = "(CAST(? AS TEXT), CAST(? AS BIGINT))", ", (?, ?)" * (keys - 1)
    wanted = f"WITH wanted (rollout, number) AS (VALUES {first}{rest})"
    return f"{wanted} SELECT count(*) FROM wanted JOIN {table} ON rollout_id = rollout AND id = number"


def have_all(database: Database, table: str, keys: set[tuple[str, int]]) -> bool:
    """Whether all these steps or nodes are stored."""
    if not keys:
        return True
    fields = [field for key in keys for field in key]
    return database.execute(_count_of(table, len(keys)), fields).fetchone()[0] == len(keys)


def marks(values: Collection[Any]) -> str:
    """A place for each value."""
    return ", ".join("?" * len(values))


def portions(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """The values in parts that a statement can carry, at up to ten places for each."""
    return (values[first : first + MANY] for first in range(0, len(values), MANY))


def tuples(width: int, rows: int) -> str:
    """Places for rows of so many values."""
    return ", ".join([f"({', '.join('?' * width)})"] * rows)


def count_move(database: Database, channel: str, before: str, after: str, n: int = 1) -> None:
    """Count `n` groups that went from one state to another."""
    database.count(channel, [CounterRow("state", str(before), -n), CounterRow("state", str(after), n)])
