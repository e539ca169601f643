"""The shared pool: tables in a PostgreSQL database, one schema per run, for gateways and trainers on many machines."""

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from penstock.errors import ConfigError, PoolError, PoolFailed
from penstock.pool.base import Kind, Pool
from penstock.pool.database import Tally
from penstock.pool.leases import Clock, LeaseClock
from penstock.pool.postgres_bell import PostgresBell
from penstock.pool.postgres_tables import migrate
from penstock.pool.sql import SqlPool

try:
    import psycopg
    from psycopg import sql as text
    from psycopg.pq import TransactionStatus
except ImportError as cause:
    raise ConfigError("pool.name = 'postgres' needs psycopg: pip install 'penstock[postgres]'") from cause

READERS = 2
"""Connections that read: a long report leaves one for the others."""

FAULTS = (psycopg.Error, UnicodeError, OverflowError)


def open_pool(folder: Path, *, url: str = "", clock: Clock = time.monotonic) -> Pool:
    """The pool of the run that `folder` is named after, in the database at `url`; its tables are made where there are none."""
    check_url(url)
    schema = schema_name(folder.resolve().name)
    where = partial(explain, url=url)
    with ExitStack() as opened:
        try:
            writing = opened.enter_context(closing(PostgresDatabase(url, schema)))
            migrate(writing, schema)
            reading = [opened.enter_context(closing(PostgresDatabase(url, schema))) for _ in range(READERS)]
            bell = PostgresBell(partial(connect, url, schema), schema)
            opened.callback(bell.close)
            pool = SqlPool(writing, reading, LeaseClock(clock), where, bell)
        except FAULTS as cause:
            raise where(cause) from cause
        opened.pop_all()
    return pool


def check_url(url: str) -> None:
    """ConfigError where this cannot be the address of a database."""
    if not url:
        raise ConfigError("pool.name = 'postgres' needs pool.url, for example 'postgresql://user@host/penstock'")
    if urlsplit(url).password:
        raise ConfigError("pool.url holds a password, which would be stored with the run; leave it to PGPASSWORD or ~/.pgpass")


def rename_run(url: str, before: str, after: str) -> None:
    """Keep the tables of the run `before` as those of a run called `after`, as its folder is kept under another name."""
    try:
        with connect(url, schema_name(before)) as connection:
            found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema_name(before),)).fetchone()
            names = [text.Identifier(schema_name(name)) for name in (before, after)]
            if found:
                connection.execute(text.SQL("ALTER SCHEMA {} RENAME TO {}").format(*names))
    except FAULTS as cause:
        raise explain(cause, url) from cause


def schema_name(run: str) -> str:
    """Where the tables of a run are: its name where that can be one, else the name with a digest."""
    plain = re.sub(r"[^a-z0-9_]", "_", run.lower())[:40]
    digest = "" if plain == run else f"_{hashlib.sha256(run.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
    return f"penstock_{plain}{digest}"


class PostgresDatabase:
    """See `Database`. A connection that broke is opened anew with the next transaction.

    Each writer keeps running counts of its own, which readers add up: otherwise all writers would wait for each other's commits.
    """

    LOCK: ClassVar[str] = " FOR UPDATE"
    SKIP: ClassVar[str] = " FOR UPDATE SKIP LOCKED"
    SETTLED: ClassVar[str] = "by < pg_snapshot_xmin(pg_current_snapshot())"
    ERRORS: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error,)

    def __init__(self, url: str, schema: str) -> None:
        self._url = url
        self._schema = schema
        self._writer = secrets.token_hex(8)
        self._connection = connect(self._url, self._schema)

    @property
    def in_transaction(self) -> bool:
        """See `Database.in_transaction`."""
        return not self._connection.closed and self._connection.info.transaction_status != TransactionStatus.IDLE

    def begin(self) -> None:
        """See `Database.begin`."""
        self._begin("BEGIN")

    def begin_reading(self) -> None:
        """See `Database.begin_reading`."""
        self._begin("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Any:
        """See `Database.execute`."""
        given = [value.value if isinstance(value, Enum) else value for value in values]
        return self._connection.execute(_marked(sql), given)

    def rows(self, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[list[Any]]:
        """See `Database.rows`."""
        return self.execute(f"SELECT {', '.join(columns)} {rest}", values).fetchall()

    def alone(self, what: str) -> None:
        """See `Database.alone`."""
        digest = hashlib.sha256(f"{self._schema} {what}".encode("utf-8", "replace")).digest()
        self.execute("SELECT pg_advisory_xact_lock(?)", (int.from_bytes(digest[:8], "big", signed=True),))

    def count(self, channel: str, changes: Iterable[Tally]) -> None:
        """See `Database.count`."""
        rows = [(channel, kind, name, self._writer, n) for (kind, name), n in sorted(_summed(changes))]
        self.execute(
            f"""INSERT INTO tally (channel, kind, name, writer, n) VALUES {", ".join(["(?, ?, ?, ?, ?)"] * len(rows))}
                ON CONFLICT (channel, kind, name, writer)
                DO UPDATE SET n = CASE tally.kind WHEN 'top' THEN greatest(tally.n, excluded.n) ELSE tally.n + excluded.n END""",
            [value for row in rows for value in row],
        )

    def tell(self, changes: Iterable[tuple[Kind, str, str]]) -> None:
        """See `Database.tell`. Whoever listens is woken when the transaction is committed."""
        rows = [value for change in changes for value in change]
        if rows:
            marks = ", ".join(["(?, ?, ?)"] * (len(rows) // 3))
            self.execute(f"INSERT INTO changes (kind, channel, id) VALUES {marks}", rows)
            self.execute(f"NOTIFY {self._schema}")

    def close(self) -> None:
        """See `Database.close`."""
        self._connection.close()

    def _begin(self, statement: str) -> None:
        if self._connection.closed or self._connection.broken:
            self._connection = connect(self._url, self._schema)
        try:
            self._connection.execute(statement.encode())
        except psycopg.OperationalError:  # the server restarted since: nothing has been done yet, so a new connection will do
            self._connection.close()
            self._connection = connect(self._url, self._schema)
            self._connection.execute(statement.encode())


def connect(url: str, schema: str) -> "psycopg.Connection[Any]":
    """A connection in which a commit is on disk when it returns."""
    connection = psycopg.connect(url, autocommit=True, connect_timeout=10, application_name="penstock")
    connection.execute(text.SQL("SET search_path TO {}").format(text.Identifier(schema)))
    connection.execute("SET synchronous_commit TO on")
    return connection


def explain(cause: Exception, url: str) -> Exception:
    """A fault of the database or of a value as a PoolError with a remedy; any other error as it is."""
    if not isinstance(cause, FAULTS):
        return cause
    reason = " ".join(str(cause).split())
    kind = PoolError
    if isinstance(cause, UnicodeError | OverflowError | psycopg.DataError):
        told = f"a value cannot be stored; leave out NUL, lone surrogates and numbers beyond 64 bits ({reason})"
    elif isinstance(cause, psycopg.errors.DiskFull | psycopg.errors.OutOfMemory):
        kind, told = PoolFailed, f"the server has no room left; free some space and repeat, nothing acknowledged is lost ({reason})"
    elif isinstance(cause, psycopg.OperationalError):
        kind, told = PoolFailed, f"the server cannot be reached or refused; check pool.url and that it runs ({reason})"
    else:
        told = f"cannot be used: {reason}"
    error = kind(f"pool at {urlsplit(url).hostname or url}: {told}")
    error.__cause__ = cause
    return error


def _summed(changes: Iterable[Tally]) -> Iterator[tuple[tuple[str, str], int]]:
    """Each count once: a statement may touch a row only once."""
    sums: dict[tuple[str, str], int] = {}
    for kind, name, n in changes:
        before = sums.get((kind, name))
        sums[kind, name] = n if before is None else max(before, n) if kind == "top" else before + n
    yield from sums.items()


@lru_cache(maxsize=1024)
def _marked(sql: str) -> bytes:
    """The statement with PostgreSQL's marks for values; none of ours holds a question mark or a percent sign otherwise."""
    return sql.replace("?", "%s").encode()
