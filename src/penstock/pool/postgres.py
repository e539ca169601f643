"""The PostgreSQL tables, as a numbered list of changes."""

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import psycopg

from penstock.errors import ConfigError, PoolError, PoolFailed
from penstock.pool.base import Kind, Pool
from penstock.pool.leases import Clock, LeaseClock
from penstock.pool.notifier import Notifier
from penstock.pool.sql.database import CounterRow, Database
from penstock.pool.sql.pool import SqlPool

MIGRATIONS = [
    (
        # lease_id: the last lease that held the group; oldest: the oldest version on a token that counts, once it is complete;
        # min_size: how many rollouts must have completed before the group is
        """CREATE TABLE groups (id TEXT PRIMARY KEY, channel TEXT NOT NULL, seq BIGINT NOT NULL, state TEXT NOT NULL,
           oldest BIGINT, lease_id TEXT, record BYTEA NOT NULL, crc BIGINT NOT NULL, min_size BIGINT NOT NULL DEFAULT 0)""",
        "CREATE INDEX groups_by_state ON groups (channel, state, seq, id)",
        "CREATE INDEX groups_by_seq ON groups (channel, seq, id)",
        # current: whether it is the last attempt at its place; ended: NULL while it runs
        """CREATE TABLE rollouts (id TEXT PRIMARY KEY, group_id TEXT NOT NULL, place BIGINT NOT NULL, channel TEXT NOT NULL,
           current INTEGER NOT NULL, ended TEXT, oldest BIGINT, message BYTEA NOT NULL, record BYTEA NOT NULL,
           crc BIGINT NOT NULL)""",
        "CREATE INDEX rollouts_by_group ON rollouts (group_id, current, place)",
        """CREATE TABLE nodes (rollout_id TEXT NOT NULL, id BIGINT NOT NULL, record BYTEA NOT NULL, token_ids BYTEA NOT NULL,
           crc BIGINT NOT NULL, PRIMARY KEY (rollout_id, id))""",
        """CREATE TABLE steps (rollout_id TEXT NOT NULL, id BIGINT NOT NULL, record BYTEA NOT NULL, completion_ids BYTEA NOT NULL,
           logprobs BYTEA NOT NULL, full_logprobs BYTEA, versions BYTEA NOT NULL, crc BIGINT NOT NULL,
           PRIMARY KEY (rollout_id, id))""",
        """CREATE TABLE grades (position BIGINT GENERATED ALWAYS AS IDENTITY, rollout_id TEXT NOT NULL, id BYTEA NOT NULL,
           record BYTEA NOT NULL, crc BIGINT NOT NULL, PRIMARY KEY (rollout_id, id))""",
        # id: the step that is marked, -1 for the whole rollout
        """CREATE TABLE marks (rollout_id TEXT NOT NULL, id BIGINT NOT NULL, record BYTEA NOT NULL, crc BIGINT NOT NULL,
           PRIMARY KEY (rollout_id, id))""",
        # what viewers and trainers follow; by: the transaction, since one with an earlier position may be committed later
        """CREATE TABLE changes (position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, kind TEXT NOT NULL,
           channel TEXT NOT NULL, id TEXT NOT NULL, by XID8 NOT NULL DEFAULT pg_current_xact_id())""",
        # beat: counted up with each renewal
        "CREATE TABLE leases (id TEXT PRIMARY KEY, open INTEGER NOT NULL, beat BIGINT NOT NULL, lease_s DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX leases_open ON leases (id) WHERE open = 1",
        """CREATE TABLE lease_groups (lease_id TEXT NOT NULL, position BIGINT NOT NULL, group_id TEXT NOT NULL,
           PRIMARY KEY (lease_id, position))""",
        """CREATE TABLE ledger (position BIGINT GENERATED ALWAYS AS IDENTITY, group_id TEXT PRIMARY KEY, lease_id TEXT NOT NULL,
           version BIGINT NOT NULL)""",
        # running counts of each writer, so that statistics need not read the tables above
        """CREATE TABLE tally (channel TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, writer TEXT NOT NULL,
           n BIGINT NOT NULL, PRIMARY KEY (channel, kind, name, writer))""",
    ),
    (
        # checksums over what several rows say together; NULL in rows of earlier formats
        "ALTER TABLE groups ADD COLUMN seal BYTEA",
        "ALTER TABLE rollouts ADD COLUMN seal BYTEA",
        "ALTER TABLE ledger ADD COLUMN seal BYTEA",
    ),
]
"""Each entry takes the tables from the format of its index to the next; an entry that was released is never changed."""


def migrate(database: Database, schema: str) -> None:
    """Bring the tables up to date, whole or not at all, and one process at a time."""
    database.begin()
    try:
        database.alone("migration")
        database.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        database.execute("CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL)")
        found = database.execute("SELECT version FROM format").fetchone()
        version: int = found[0] if found else 0
        if version > len(MIGRATIONS):
            raise PoolError(
                f"schema {schema} was written by a newer penstock (format {version}, known {len(MIGRATIONS)}); upgrade penstock"
            )
        for statement in [statement for change in MIGRATIONS[version:] for statement in change]:
            database.execute(statement)
        database.execute("DELETE FROM format")
        database.execute("INSERT INTO format (version) VALUES (?)", (len(MIGRATIONS),))
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


ASIDE_S = 1.0
"""How long to wait before a broken connection is tried again."""


class PostgresNotifier(Notifier):
    """`connect` opens the connection that listens; it is opened anew when it breaks."""

    def __init__(self, connect: Callable[[], "psycopg.Connection[Any]"], channel: str) -> None:
        super().__init__()
        self._connect, self._channel = connect, channel
        self._closed = threading.Event()
        self._connection = connect()
        self._thread = threading.Thread(target=self._run, name="penstock-pool-bell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with suppress(psycopg.Error), self._connect() as waking:
            waking.execute(f"NOTIFY {self._channel}".encode())
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except psycopg.Error:
                self._closed.wait(ASIDE_S)
                with suppress(psycopg.Error):
                    self._connection = self._connect()
                self.ring()  # what happened meanwhile was not heard
        self._connection.close()

    def _listen(self) -> None:
        self._connection.execute(f"LISTEN {self._channel}".encode())
        while not self._closed.is_set():
            for _ in self._connection.notifies(timeout=TICK_S, stop_after=1):
                self.ring()


TICK_S = 0.5
"""How long closing may have to wait for the thread."""


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
            bell = PostgresNotifier(partial(connect, url, schema), schema)
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
        return not self._connection.closed and self._connection.info.transaction_status != TransactionStatus.IDLE

    def begin(self) -> None:
        self._begin("BEGIN")

    def begin_reading(self) -> None:
        self._begin("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Any:
        given = [value.value if isinstance(value, Enum) else value for value in values]
        return self._connection.execute(_marked(sql), given)

    def rows(self, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[list[Any]]:
        return self.execute(f"SELECT {', '.join(columns)} {rest}", values).fetchall()

    def alone(self, what: str) -> None:
        digest = hashlib.sha256(f"{self._schema} {what}".encode("utf-8", "replace")).digest()
        self.execute("SELECT pg_advisory_xact_lock(?)", (int.from_bytes(digest[:8], "big", signed=True),))

    def count(self, channel: str, changes: Iterable[CounterRow]) -> None:
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


def _summed(changes: Iterable[CounterRow]) -> Iterator[tuple[tuple[str, str], int]]:
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
