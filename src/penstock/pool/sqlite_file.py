"""The SQLite file: its tables, as a numbered list of changes, and how it is opened and its faults are explained."""

import sqlite3
import time
from pathlib import Path

from penstock.errors import PoolError, PoolFailed
from penstock.pool.sql.database import BUSY_S, SqliteDatabase

APPLICATION_ID = 0x50535450
"""Marks the file as ours, so that nobody's other database is taken for a pool."""

FAULTS = (sqlite3.Error, OSError, UnicodeError, OverflowError)
"""What `explain` explains."""

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


def open_database(path: Path, *, max_pages: int | None = None) -> SqliteDatabase:
    """A connection in which a commit is on disk when it returns; it may be handed from thread to thread."""
    database = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=512, factory=SqliteDatabase
    )
    try:
        _recognise(database, path)
        _configure(database, max_pages)
    except BaseException:
        database.close()
        raise
    return database


def migrate(database: sqlite3.Connection) -> None:
    """Bring the tables up to date, whole or not at all."""
    database.execute("BEGIN IMMEDIATE")
    try:
        version = _number(database, "user_version")
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
    """A fault of the file or of a value as a PoolError with a remedy; any other error as it is."""
    if not isinstance(cause, FAULTS):
        return cause
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    kind = PoolFailed
    if isinstance(cause, UnicodeEncodeError | OverflowError):
        kind, reason = PoolError, UNFIT
    elif isinstance(cause, UnicodeDecodeError):  # SQLite quotes damaged names in its message
        reason = _REMEDIES[sqlite3.SQLITE_CORRUPT]
    else:
        reason = _REMEDIES.get(code, "cannot be used; check the folder, its permissions and the disk")
    error = kind(f"pool {path}: {reason} ({cause})")
    error.__cause__ = cause
    return error


UNFIT = "a value cannot be stored; leave out lone surrogates and numbers beyond 64 bits"
_REMEDIES = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space and repeat, nothing acknowledged is lost",
    sqlite3.SQLITE_BUSY: "another process is writing to it and does not let go; stop that one",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a copy, or save what is left with `sqlite3 pool.db .recover`",
    sqlite3.SQLITE_NOTADB: "the file is not a penstock pool, or it is damaged; move it away or restore a copy",
}


def _recognise(database: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not ours before anything in it is touched."""
    # in this order: another process may be making it just now
    tables, version = _number(database, "schema_version"), _number(database, "user_version")
    ours = _number(database, "application_id") == APPLICATION_ID
    if not ours and (version or tables):
        raise PoolError(f"{path} is a database, but not a penstock pool; move it away or choose another run folder")
    if version > len(MIGRATIONS):
        raise PoolError(f"{path} was written by a newer penstock (format {version}, known {len(MIGRATIONS)}); upgrade penstock")


def _configure(database: sqlite3.Connection, max_pages: int | None) -> None:
    database.execute("PRAGMA page_size = 8192")  # of a new file: a step of 2k tokens goes in a third faster than with 4096
    mode = _write_ahead(database)
    if mode != "wal":
        raise PoolError(
            f"the pool's file system cannot hold a write-ahead log (journal mode {mode}); put the run folder on a local disk"
        )
    database.execute("PRAGMA synchronous = FULL")
    database.execute("PRAGMA journal_size_limit = 67108864")
    if max_pages is not None:
        database.execute(f"PRAGMA max_page_count = {max_pages:d}")


def _write_ahead(database: sqlite3.Connection) -> str:
    """Keep a write-ahead log, and return the journal mode that there is now.

    SQLite waits for no lock here, so that of two processes which make the same file at once, one would fail.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        except sqlite3.OperationalError as cause:
            if cause.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _number(database: sqlite3.Connection, pragma: str) -> int:
    return database.execute(f"PRAGMA {pragma}").fetchone()[0]
