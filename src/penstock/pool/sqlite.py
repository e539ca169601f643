"""The embedded pool: one SQLite file, `pool.db` in the run folder; its connections, its tables and its faults explained."""

import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import orjson

from penstock.errors import PoolError, PoolFailed
from penstock.pool.base import ChangeKind, CheckProgress, CounterChange
from penstock.pool.check import PoolCheck, check_database
from penstock.pool.rules import Clock, LeaseClock
from penstock.pool.sql_pool import SqlPool

T = TypeVar("T")

BUSY_S = 30.0
"""How long another process may hold the file before a write fails."""
BEGIN_POLL_S = 0.0003
"""Pause between two tries to begin a transaction while another process writes."""

APPLICATION_ID = 0x50535450
"""Marks the file as a pool, so that no other SQLite database is taken for one."""

FAULTS = (sqlite3.Error, OSError, UnicodeError, OverflowError)
"""Errors that `explain` turns into a PoolError."""
READERS = 2
"""Connections for reading, so that a long report leaves one for the others."""
EXCLUSIVE_S = 2.0
"""How long `compact` waits for other processes to close the file."""


class SqlitePool(SqlPool):
    """Opens `folder/pool.db`, and creates it if needed. `max_pages` bounds the file, in pages of 8 KiB."""

    name: ClassVar[str] = "sqlite"

    def __init__(self, folder: Path, *, url: str = "", clock: Clock = time.monotonic, max_pages: int | None = None) -> None:
        self.check_url(url)
        path = pool_file(folder)
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                writing = stack.enter_context(closing(open_database(path, max_pages=max_pages)))
                migrate(writing)
                writing.execute("PRAGMA busy_timeout = 0")  # only `SqliteDatabase.begin` has to wait, and polls
                reading = [stack.enter_context(closing(open_database(path))) for _ in range(READERS)]
                explained = partial(explain, path=path)
                super().__init__(writing, reading, LeaseClock(clock), explained)
            except FAULTS as cause:
                raise explain(cause, path) from cause
            stack.pop_all()

    @classmethod
    def why_unreadable(cls, folder: Path) -> str | None:
        if not pool_file(folder).exists():
            return "this run has no pool.db yet, so there is nothing to read; start it first"
        if cls.size_bytes(folder, "") == 0:
            return "its pool.db is empty, so there is nothing to read; restore a copy"
        return None

    @classmethod
    def size_bytes(cls, folder: Path, url: str) -> int | None:
        files = (pool_file(folder), folder / "pool.db-wal")
        return sum(file.stat().st_size for file in files if file.exists())

    @classmethod
    @contextmanager
    def reading(cls, folder: Path, url: str) -> Generator["SqliteDatabase"]:
        path = pool_file(folder)
        try:
            with open_read_only(path) as database:
                database.begin_reading()
                yield database
        except FAULTS as cause:
            raise explain(cause, path) from cause

    @classmethod
    def verify(cls, folder: Path, url: str, progress: CheckProgress) -> PoolCheck:
        return check_file(pool_file(folder), progress)

    @classmethod
    def compact(cls, folder: Path) -> None:
        path = pool_file(folder)
        try:
            with closing(open_database(path)) as database:
                database.execute(f"PRAGMA busy_timeout = {int(EXCLUSIVE_S * 1000)}")
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                _leave_wal(database, path)
                try:
                    database.execute("VACUUM")
                finally:
                    database.execute("PRAGMA journal_mode = WAL").fetchone()
        except FAULTS as cause:
            raise explain(cause, path) from cause


def pool_file(folder: Path) -> Path:
    return folder / "pool.db"


def _leave_wal(database: sqlite3.Connection, path: Path) -> None:
    """Switch off the write-ahead log. SQLite grants that only if no other process has the file open."""
    try:
        mode: str = database.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    except sqlite3.OperationalError as cause:
        if not is_busy(cause):
            raise
        mode = "wal"
    if mode != "delete":
        raise PoolError(f"{path}: another process has it open; stop the training, gateway or report that reads it, then compact")


# The file

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
        # polls, because SQLite's busy handler pauses longer after each try
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
    sqlite3.SQLITE_BUSY: "another process keeps it locked; stop that one",
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


# Verification of a file

FAULTS_NAMED = 1000
"""How many faults SQLite names; one bad page may cause thousands."""
_DAMAGE = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)
"""What reading a damaged file may raise; a damaged length can ask for any amount of memory."""


def check_file(path: Path, progress: CheckProgress) -> PoolCheck:
    """Check the pool in this file, which must exist. A file that cannot be opened is a finding."""
    try:
        with closing(_open(path)) as database:
            mismatch = _format_mismatch(database)
            if mismatch:
                result = PoolCheck()
                result.add("file", "", mismatch)
                return result
            database.begin_reading()
            faults = _file_faults(database)
            result = check_database(database, progress, damage=_DAMAGE)
            for fault in faults:
                result.add(*_locate_fault(database, fault), fault)
    except _DAMAGE as cause:
        result = PoolCheck()
        result.add("file", "", str(explain(cause, path)))
    return result


def _open(path: Path) -> SqliteDatabase:
    """Open a connection that cannot write. If its write-ahead log cannot be opened or created, read the file alone."""
    where = path.resolve().as_uri()
    database = _connect(f"{where}?mode=ro")
    try:
        database.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError as cause:
        database.close()
        no_log = cause.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        if not no_log or path.with_name(f"{path.name}-wal").exists():
            raise
        return _connect(f"{where}?mode=ro&immutable=1")
    except BaseException:
        database.close()
        raise
    return database


def _connect(uri: str) -> SqliteDatabase:
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, factory=SqliteDatabase)


def _format_mismatch(database: SqliteDatabase) -> str | None:
    """Return why the file is not a pool of this format; None if it is."""
    application_id, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if application_id != APPLICATION_ID:
        return "its mark says that it is not a penstock pool"
    if version > len(MIGRATIONS):
        return f"its format {version} is that of a newer penstock; upgrade penstock"
    if version < len(MIGRATIONS):
        return f"its format {version} is that of an earlier penstock; `penstock pool stats` brings it up to date, then verify again"
    return None


def _file_faults(database: SqliteDatabase) -> list[str]:
    """Return what SQLite itself finds: damaged pages and cells, indices that do not match their tables."""
    try:
        rows = database.execute(f"PRAGMA integrity_check({FAULTS_NAMED})").fetchall()
    except _DAMAGE as cause:
        return [f"cannot be checked: {cause}"]
    lines = [line for row in rows for line in str(row[0]).splitlines()]
    return [line for line in lines if line != "ok" and not line.startswith("***")]


def _locate_fault(database: SqliteDatabase, fault: str) -> tuple[str, str]:
    """Return the table that a fault is in, and the rollout or group if it can be found."""
    found = re.search(r"(?:row (\d+) missing from|in|of entries in) index (\w+)", fault)
    if found is None:
        return "file", ""
    row, index = found.groups()
    try:
        table = database.execute("SELECT tbl_name FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        if table is None or row is None:
            return table[0] if table else "file", ""
        column = {"groups": "id", "rollouts": "id", "leases": "id", "ledger": "group_id"}.get(table[0], "rollout_id")
        name = database.execute(f"SELECT {column} FROM {table[0]} NOT INDEXED WHERE rowid = ?", (int(row),)).fetchone()
        return table[0], str(name[0]) if name else ""
    except _DAMAGE:
        return "file", ""
