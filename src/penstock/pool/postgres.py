"""The shared pool: the tables of a run in a schema of a PostgreSQL database, with their connections and faults explained."""

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from penstock.errors import ConfigError, PoolError, PoolFailed
from penstock.pool.base import ChangeKind, CheckProgress, CounterChange
from penstock.pool.check import PoolCheck, check_database
from penstock.pool.rules import Clock, LeaseClock
from penstock.pool.sql_pool import Notifier, SqlPool
from penstock.system.packages import install_command

try:
    import psycopg
    from psycopg import sql
    from psycopg.pq import TransactionStatus
except ImportError as cause:
    raise ConfigError(f"pool.name = 'postgres' needs psycopg: {install_command('postgres')}") from cause

FAULTS = (psycopg.Error, UnicodeError, OverflowError)
"""Errors that `explain` turns into a PoolError."""
RECONNECT_S = 1.0
"""Pause before a broken connection for notifications is opened again."""
LISTEN_S = 0.5
"""How long the listening thread waits before it looks whether it was closed."""
READERS = 2
"""Connections for reading, so that a long report leaves one for the others."""


class PostgresPool(SqlPool):
    """Opens the pool of the run that `folder` is named after, in the database at `url`, and creates its tables if needed."""

    name: ClassVar[str] = "postgres"

    def __init__(self, folder: Path, *, url: str = "", clock: Clock = time.monotonic) -> None:
        self.check_url(url)
        schema = schema_name(folder.resolve().name)
        explained = partial(explain, url=url)
        with ExitStack() as stack:
            try:
                writing = stack.enter_context(closing(PostgresDatabase(url, schema)))
                migrate(writing, schema)
                reading = [stack.enter_context(closing(PostgresDatabase(url, schema))) for _ in range(READERS)]
                notifier = PostgresNotifier(partial(connect, url, schema), schema)
                stack.callback(notifier.close)
                super().__init__(writing, reading, LeaseClock(clock), explained, notifier)
            except FAULTS as cause:
                raise explained(cause) from cause
            stack.pop_all()

    @classmethod
    def check_url(cls, url: str) -> None:
        if not url:
            raise ConfigError("pool.name = 'postgres' needs pool.url, for example 'postgresql://user@host/penstock'")
        if urlsplit(url).password:
            raise ConfigError("pool.url holds a password, which would be stored with the run; leave it to PGPASSWORD or ~/.pgpass")

    @classmethod
    def size_bytes(cls, folder: Path, url: str) -> int | None:
        tables = "relnamespace = current_schema()::regnamespace AND relkind = 'r'"
        query = f"SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE {tables}"
        with _connected(folder, url) as database:
            return int(database.execute(query).fetchone()[0] or 0)

    @classmethod
    @contextmanager
    def reading(cls, folder: Path, url: str) -> Generator["PostgresDatabase"]:
        with _connected(folder, url) as database:
            database.begin_reading()
            yield database

    @classmethod
    def verify(cls, folder: Path, url: str, progress: CheckProgress) -> PoolCheck:
        with _connected(folder, url) as database:
            database.begin_reading()
            return check_database(database, progress)

    @classmethod
    def rename_run(cls, url: str, before: str, after: str) -> None:
        rename_schema(url, schema_name(before), schema_name(after))


def schema_name(run: str) -> str:
    """Return the schema of a run: its name if that is a plain identifier, otherwise the name with a digest."""
    plain = re.sub(r"[^a-z0-9_]", "_", run.lower())[:40]
    digest = "" if plain == run else f"_{hashlib.sha256(run.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
    return f"penstock_{plain}{digest}"


@contextmanager
def _connected(folder: Path, url: str) -> Generator["PostgresDatabase"]:
    try:
        with closing(PostgresDatabase(url, schema_name(folder.resolve().name))) as database:
            yield database
    except FAULTS as cause:
        raise explain(cause, url) from cause


# The tables

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
"""Each entry takes the tables from the format of its index to the next. A released entry is never changed."""


class PostgresDatabase:
    """A `PoolDatabase`. A broken connection is opened again with the next transaction.

    Each writer has its own rows of running counts, which readers add up: with shared rows all writers would wait for each
    other's commits.
    """

    LOCK: ClassVar[str] = " FOR UPDATE"
    SKIP: ClassVar[str] = " FOR UPDATE SKIP LOCKED"
    # a transaction that is still open may have taken an earlier position; rows from before all open ones are final
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

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        plain = [value.value if isinstance(value, Enum) else value for value in values]
        return self._connection.execute(_with_placeholders(statement), plain)

    def select(self, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[list[Any]]:
        return self.execute(f"SELECT {', '.join(columns)} {rest}", values).fetchall()

    def lock(self, name: str) -> None:
        digest = hashlib.sha256(f"{self._schema} {name}".encode("utf-8", "replace")).digest()
        self.execute("SELECT pg_advisory_xact_lock(?)", (int.from_bytes(digest[:8], "big", signed=True),))

    def add_counts(self, channel: str, changes: Iterable[CounterChange]) -> None:
        rows = [(channel, kind, name, self._writer, n) for (kind, name), n in sorted(_merged(changes))]
        self.execute(
            f"""INSERT INTO tally (channel, kind, name, writer, n) VALUES {", ".join(["(?, ?, ?, ?, ?)"] * len(rows))}
                ON CONFLICT (channel, kind, name, writer)
                DO UPDATE SET n = CASE tally.kind WHEN 'top' THEN greatest(tally.n, excluded.n) ELSE tally.n + excluded.n END""",
            [value for row in rows for value in row],
        )

    def log_changes(self, changes: Iterable[tuple[ChangeKind, str, str]]) -> None:
        rows = [value for change in changes for value in change]
        if rows:
            groups = ", ".join(["(?, ?, ?)"] * (len(rows) // 3))
            self.execute(f"INSERT INTO changes (kind, channel, id) VALUES {groups}", rows)
            self.execute(f"NOTIFY {self._schema}")  # PostgreSQL delivers it when the transaction commits

    def close(self) -> None:
        self._connection.close()

    def _begin(self, statement: str) -> None:
        if self._connection.closed or self._connection.broken:
            self._connection = connect(self._url, self._schema)
        try:
            self._connection.execute(statement.encode())
        except psycopg.OperationalError:  # the server restarted since; nothing was written yet, so a new connection is enough
            self._connection.close()
            self._connection = connect(self._url, self._schema)
            self._connection.execute(statement.encode())


def connect(url: str, schema: str) -> "psycopg.Connection[Any]":
    """Open a connection whose commits are on disk when they return."""
    connection = psycopg.connect(url, autocommit=True, connect_timeout=10, application_name="penstock")
    connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(schema)))
    connection.execute("SET synchronous_commit TO on")
    return connection


def migrate(database: "PostgresDatabase", schema: str) -> None:
    """Bring the tables up to date, in one transaction and one process at a time."""
    database.begin()
    try:
        database.lock("migration")
        database.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        database.execute("CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL)")
        row = database.execute("SELECT version FROM format").fetchone()
        version: int = row[0] if row else 0
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


class PostgresNotifier(Notifier):
    """Notifies of the changes of all processes, as a thread hears of them. `connect` opens its connection, again if it breaks."""

    def __init__(self, connect: Callable[[], "psycopg.Connection[Any]"], channel: str) -> None:
        super().__init__()
        self._connect, self._channel = connect, channel
        self._closed = threading.Event()
        self._connection = connect()
        self._thread = threading.Thread(target=self._run, name="penstock-pool-notifier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with suppress(psycopg.Error), self._connect() as waking:
            waking.execute(f"NOTIFY {self._channel}".encode())  # wakes the thread from its wait
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except psycopg.Error:
                self._closed.wait(RECONNECT_S)
                with suppress(psycopg.Error):
                    self._connection = self._connect()
                self.notify()  # notifications of the meantime are lost
        self._connection.close()

    def _listen(self) -> None:
        self._connection.execute(f"LISTEN {self._channel}".encode())
        while not self._closed.is_set():
            for _ in self._connection.notifies(timeout=LISTEN_S, stop_after=1):
                self.notify()


def rename_schema(url: str, before: str, after: str) -> None:
    """Rename a schema, if it exists."""
    try:
        with connect(url, before) as connection:
            found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (before,)).fetchone()
            if found:
                names = [sql.Identifier(name) for name in (before, after)]
                connection.execute(sql.SQL("ALTER SCHEMA {} RENAME TO {}").format(*names))
    except FAULTS as cause:
        raise explain(cause, url) from cause


def explain(cause: Exception, url: str) -> Exception:
    """Turn a fault of the database or of a value into a PoolError with a remedy; return any other error unchanged."""
    if not isinstance(cause, FAULTS):
        return cause
    reason = " ".join(str(cause).split())
    kind = PoolError
    if isinstance(cause, UnicodeError | OverflowError | psycopg.DataError):
        problem = f"a value cannot be stored; leave out NUL, lone surrogates and numbers beyond 64 bits ({reason})"
    elif isinstance(cause, psycopg.errors.DiskFull | psycopg.errors.OutOfMemory):
        kind, problem = (
            PoolFailed,
            f"the server has no room left; free some space and repeat, nothing acknowledged is lost ({reason})",
        )
    elif isinstance(cause, psycopg.OperationalError):
        kind, problem = PoolFailed, f"the server cannot be reached or refused; check pool.url and that it runs ({reason})"
    else:
        problem = f"cannot be used: {reason}"
    error = kind(f"pool at {urlsplit(url).hostname or url}: {problem}")
    error.__cause__ = cause
    return error


def _merged(changes: Iterable[CounterChange]) -> Iterator[tuple[tuple[str, str], int]]:
    """Merge changes of the same counter: ON CONFLICT DO UPDATE may touch a row only once per statement."""
    sums: dict[tuple[str, str], int] = {}
    for kind, name, n in changes:
        known = sums.get((kind, name))
        sums[kind, name] = n if known is None else max(known, n) if kind == "top" else known + n
    yield from sums.items()


@lru_cache(maxsize=1024)
def _with_placeholders(statement: str) -> bytes:
    """Write `?` as `%s`. No statement of ours has a question mark or a percent sign otherwise."""
    return statement.replace("?", "%s").encode()
