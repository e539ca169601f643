"""Whether a SQLite pool is as it was written: the file first, then what is in it. It reads only."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from penstock.pool.check import Checked, Told, check_database
from penstock.pool.database import SqliteDatabase
from penstock.pool.migrations import APPLICATION_ID, BUSY_S, MIGRATIONS, explain

FAULTS_NAMED = 1000
"""Of the file; one bad page may make thousands."""
_DAMAGE = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)
"""What reading a damaged file may raise: a length that was hit asks for any amount of memory."""


def check_file(path: Path, told: Told) -> Checked:
    """Check the pool in this file, which must exist; a file that cannot be opened is a finding."""
    try:
        with closing(_open(path)) as database:
            strange = _strange(database)
            if strange:
                checked = Checked()
                checked.find("file", "", strange)
                return checked
            database.begin_reading()
            faults = _file_faults(database)
            checked = check_database(database, told, damage=_DAMAGE)
            for fault in faults:
                checked.find(*_place(database, fault), fault)
    except _DAMAGE as cause:
        checked = Checked()
        checked.find("file", "", str(explain(cause, path)))
    return checked


def _open(path: Path) -> SqliteDatabase:
    """A connection that cannot write; where not even the log beside the file can be opened, the file alone is read."""
    where = path.resolve().as_uri()
    database = _connect(f"{where}?mode=ro")
    try:
        database.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError as cause:
        database.close()
        closed = cause.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        if not closed or path.with_name(f"{path.name}-wal").exists():
            raise
        return _connect(f"{where}?mode=ro&immutable=1")
    except BaseException:
        database.close()
        raise
    return database


def _connect(uri: str) -> SqliteDatabase:
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, factory=SqliteDatabase)


def _strange(database: SqliteDatabase) -> str | None:
    """What the file is, where it is no pool of this format."""
    ours, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if ours != APPLICATION_ID:
        return "its mark says that it is not a penstock pool"
    if version > len(MIGRATIONS):
        return f"its format {version} is that of a newer penstock; upgrade penstock"
    if version < len(MIGRATIONS):
        return f"its format {version} is that of an earlier penstock; `penstock pool stats` brings it up to date, then verify again"
    return None


def _file_faults(database: SqliteDatabase) -> list[str]:
    """What SQLite itself finds: pages, cells, and indices that do not match their tables."""
    try:
        rows = database.execute(f"PRAGMA integrity_check({FAULTS_NAMED})").fetchall()
    except _DAMAGE as cause:
        return [f"cannot be checked: {cause}"]
    lines = [line for row in rows for line in str(row[0]).splitlines()]
    return [line for line in lines if line != "ok" and not line.startswith("***")]


def _place(database: SqliteDatabase, fault: str) -> tuple[str, str]:
    """The table that a fault is in, and the rollout or group where one can be told."""
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
