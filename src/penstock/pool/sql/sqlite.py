"""The SQLite file of a pool: its connection, its tables as a numbered list of migrations, and its faults explained."""

import sqlite3
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import orjson

from penstock.errors import PoolError, PoolFailed
from penstock.pool.base import ChangeKind
from penstock.pool.sql.database import CounterChange

T = TypeVar("T")

BUSY_S = 30.0
"""How long another process may hold the file before a write fails."""
BEGIN_POLL_S = 0.0003
"""Pause between two tries to begin a transaction while another process writes."""

APPLICATION_ID = 0x50535450
"""Marks the file as a pool, so that no other SQLite database is taken for one."""

FAULTS = (sqlite3.Error, OSError, UnicodeError, OverflowError)
"""Errors that `explain` turns into a PoolError."""

MIGRATIONS = [
    (
        # lease_id: the last lease that held the group; oldest: the oldest version on a token that counts, once it is complete
        """CREATE TABLE groups (id TEXT PRIMARY KEY, channel TEXT NOT NULL, seq INTEGER NOT NULL, state TEXT NOT NULL,
           oldest INTEGER, lease_id TEXT, record BLOB NOT NULL, crc INTEGER NOT NULL)""",
        "CREATE INDEX groups_by_state ON groups (channel, state, seq, id)",
        "CREATE INDEX groups_by_seq ON groups (channel, seq, id)",
        # current: whether it is the last attempt at its place; ended: NULL while it runs
        """CREATE TABLE rollouts (id TEXT PRIMARY KEY, group_id TEXT NOT NULL, place INTEGER NOT NULL, channel TEXT NOT NULL,
           current INTEGER NOT NULL, ended TEXT, oldest INTEGER, message BLOB NOT NULL, record BLOB NOT NULL,
           crc INTEGER NOT NULL)""",
        "CREATE INDEX rollouts_by_group ON rollouts (group_id, current, place)",
        """CREATE TABLE nodes (rollout_id TEXT NOT NULL, id INTEGER NOT NULL, record BLOB NOT NULL, token_ids BLOB NOT NULL,
           crc INTEGER NOT NULL, UNIQUE (rollout_id, id))""",
        """CREATE TABLE steps (rollout_id TEXT NOT NULL, id INTEGER NOT NULL, record BLOB NOT NULL, completion_ids BLOB NOT NULL,
           logprobs BLOB NOT NULL, full_logprobs BLOB, versions BLOB NOT NULL, crc INTEGER NOT NULL, UNIQUE (rollout_id, id))""",
        """CREATE TABLE grades (position INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, id BLOB NOT NULL, record BLOB NOT NULL,
           crc INTEGER NOT NULL, UNIQUE (rollout_id, id))""",
        # beat: counted up with each renewal
        "CREATE TABLE leases (id TEXT PRIMARY KEY, open INTEGER NOT NULL, beat INTEGER NOT NULL, lease_s REAL NOT NULL)",
        "CREATE INDEX leases_open ON leases (id) WHERE open",
        """CREATE TABLE lease_groups (lease_id TEXT NOT NULL, position INTEGER NOT NULL, group_id TEXT NOT NULL,
           PRIMARY KEY (lease_id, position)) WITHOUT ROWID""",
        """CREATE TABLE ledger (position INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, lease_id TEXT NOT NULL,
           version INTEGER NOT NULL)""",
        # running counts, so that statistics need not read the tables above
        """CREATE TABLE tally (channel TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL,
           PRIMARY KEY (channel, kind, name)) WITHOUT ROWID""",
    ),
    (
        # how many rollouts must have completed before the group is
        "ALTER TABLE groups ADD COLUMN min_size INTEGER NOT NULL DEFAULT 0",
        # id: the step that is marked, -1 for the whole rollout
        """CREATE TABLE marks (rollout_id TEXT NOT NULL, id INTEGER NOT NULL, record BLOB NOT NULL, crc INTEGER NOT NULL,
           PRIMARY KEY (rollout_id, id)) WITHOUT ROWID""",
        # what viewers and trainers follow
        """CREATE TABLE changes (position INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, channel TEXT NOT NULL,
           id TEXT NOT NULL)""",
    ),
    (
        # checksums over what several rows say together; NULL in rows of earlier formats
        "ALTER TABLE groups ADD COLUMN seal BLOB",
        "ALTER TABLE rollouts ADD COLUMN seal BLOB",
        "ALTER TABLE ledger ADD COLUMN seal BLOB",
    ),
]
"""Each entry takes the file from the format of its index to the next; an entry that was released is never changed."""


class SqliteDatabase(sqlite3.Connection):
    """A connection to the file. SQLite has one writer at a time for the whole file, so rows need no locks."""

    LOCK: ClassVar[str] = ""
    SKIP: ClassVar[str] = ""
    SETTLED: ClassVar[str] = "1 = 1"
    ERRORS: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error,)

    def begin(self) -> None:
        # polls by itself: SQLite's busy handler pauses ever longer between two tries
        retry_busy(lambda: self.execute("BEGIN IMMEDIATE"), pause_s=BEGIN_POLL_S)

    def begin_reading(self) -> None:
        self.execute("BEGIN")

    def select(self, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[list[Any]]:
        # one JSON value: sqlite3 releases the interpreter's lock, and waits to get it back, for every row that it fetches
        query = f"SELECT json_group_array(json_array({', '.join(columns)})) {rest}"
        return orjson.loads(self.execute(query, values).fetchone()[0])

    def lock(self, name: str) -> None: ...

    def add_counts(self, channel: str, changes: Iterable[CounterChange]) -> None:
        rows = [(channel, *change) for change in changes]
        self.execute(
            f"""INSERT INTO tally (channel, kind, name, n) VALUES {", ".join(["(?, ?, ?, ?)"] * len(rows))}
                ON CONFLICT DO UPDATE SET n = CASE kind WHEN 'top' THEN max(n, excluded.n) ELSE n + excluded.n END""",
            [value for row in rows for value in row],
        )

    def log_changes(self, changes: Iterable[tuple[ChangeKind, str, str]]) -> None:
        # one statement for all: each one releases the interpreter's lock and waits for it again
        rows = [value for change in changes for value in change]
        if rows:
            self.execute(f"INSERT INTO changes (kind, channel, id) VALUES {', '.join(['(?, ?, ?)'] * (len(rows) // 3))}", rows)


def is_busy(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def retry_busy(statement: Callable[[], T], *, pause_s: float) -> T:
    """Repeat a statement while another process holds the file, for at most BUSY_S."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return statement()
        except sqlite3.OperationalError as cause:
            if not is_busy(cause) or time.monotonic() > deadline:
                raise
        time.sleep(pause_s)


def open_database(path: Path, *, max_pages: int | None = None) -> SqliteDatabase:
    """Open a connection whose commits are on disk when they return. Threads may hand it to each other."""
    database = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=512, factory=SqliteDatabase
    )
    try:
        _check_file(database, path)
        _configure(database, max_pages)
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def open_read_only(path: Path) -> Generator[SqliteDatabase]:
    """Open a connection that changes neither the file nor its folder. A file of an earlier format is read from a migrated copy."""
    logged = path.with_name(f"{path.name}-wal").exists()
    # without a log nobody writes, and SQLite would leave an empty one behind: `immutable` makes none
    uri = f"{path.resolve().as_uri()}?mode=ro{'' if logged else '&immutable=1'}"
    connect = partial(sqlite3.connect, isolation_level=None, check_same_thread=False, factory=SqliteDatabase)
    with closing(connect(uri, uri=True, timeout=BUSY_S)) as database:
        _check_file(database, path)
        database.execute("PRAGMA query_only = ON")
        if _pragma(database, "user_version") == len(MIGRATIONS):
            yield database
            return
        with tempfile.TemporaryDirectory(prefix="penstock-view-") as folder, closing(connect(Path(folder) / path.name)) as copy:
            database.backup(copy)
            migrate(copy)
            yield copy


def migrate(database: sqlite3.Connection) -> None:
    """Bring the tables up to date, in one transaction."""
    database.execute("BEGIN IMMEDIATE")
    try:
        version = _pragma(database, "user_version")
        for number, statements in enumerate(MIGRATIONS[version:], start=version + 1):
            for statement in statements:
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {number}")
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def explain(cause: Exception, path: Path) -> Exception:
    """Turn a fault of the file or of a value into a PoolError with a remedy; return any other error unchanged."""
    if not isinstance(cause, FAULTS):
        return cause
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    kind = PoolFailed
    if isinstance(cause, UnicodeEncodeError | OverflowError):
        kind, reason = PoolError, UNSTORABLE
    elif isinstance(cause, UnicodeDecodeError):  # SQLite quotes damaged names in its message
        reason = _REMEDIES[sqlite3.SQLITE_CORRUPT]
    else:
        reason = _REMEDIES.get(code, "cannot be used; check the folder, its permissions and the disk")
    error = kind(f"pool {path}: {reason} ({cause})")
    error.__cause__ = cause
    return error


UNSTORABLE = "a value cannot be stored; leave out lone surrogates and numbers beyond 64 bits"
_REMEDIES = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space and repeat, nothing acknowledged is lost",
    sqlite3.SQLITE_BUSY: "another process is writing to it and does not let go; stop that one",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a copy, or save what is left with `sqlite3 pool.db .recover`",
    sqlite3.SQLITE_NOTADB: "the file is not a penstock pool, or it is damaged; move it away or restore a copy",
}


def _check_file(database: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a pool before anything in it is changed."""
    # the application id last: another process may be creating the file, and commits it together with the tables
    tables, version = _pragma(database, "schema_version"), _pragma(database, "user_version")
    is_pool = _pragma(database, "application_id") == APPLICATION_ID
    if not is_pool and (version or tables):
        raise PoolError(f"{path} is a database, but not a penstock pool; move it away or choose another run folder")
    if version > len(MIGRATIONS):
        raise PoolError(f"{path} was written by a newer penstock (format {version}, known {len(MIGRATIONS)}); upgrade penstock")


def _configure(database: sqlite3.Connection, max_pages: int | None) -> None:
    database.execute("PRAGMA page_size = 8192")  # for a new file; a step of 2k tokens is stored a third faster than with 4096
    # SQLite waits for no lock here: of two processes that create the same file at once, one would fail
    mode: str = retry_busy(lambda: database.execute("PRAGMA journal_mode = WAL").fetchone()[0], pause_s=0.01)
    if mode != "wal":
        raise PoolError(
            f"the pool's file system cannot hold a write-ahead log (journal mode {mode}); put the run folder on a local disk"
        )
    database.execute("PRAGMA synchronous = FULL")  # NORMAL would lose acknowledged commits when the power fails
    database.execute("PRAGMA journal_size_limit = 67108864")
    if max_pages is not None:
        database.execute(f"PRAGMA max_page_count = {max_pages:d}")


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return database.execute(f"PRAGMA {name}").fetchone()[0]
