"""Where a folder's pool is: its own file, or the database that its config names; and what can be asked of it from outside."""

import sqlite3
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.config import PoolSection, validate
from penstock.errors import ConfigError, PoolError
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.pool.check import Checked, Told, check_database, check_file
from penstock.pool.sql.database import Database
from penstock.pool.sqlite_file import FAULTS, explain, open_database

ALONE_S = 2.0
"""How long `compact` waits for others to let go of the file."""


class PoolLocation(NamedTuple):
    """A pool that exists."""

    name: str
    folder: Path
    url: str = ""

    @property
    def file(self) -> Path:
        """Of a SQLite pool."""
        return self.folder / "pool.db"


def find_pool(folder: Path) -> PoolLocation:
    """The pool of a run's or a gateway's folder, or one that was imported; ConfigError where there is none to read."""
    section = _section(folder)
    if section is None and not (folder / "pool.db").exists():
        raise ConfigError(
            f"{folder}: not a run folder; give one that `penstock train` or `penstock gateway` made, such as runs/multiply"
        )
    name, url = (section.name, section.url) if section else ("sqlite", "")
    if name == "memory":
        raise ConfigError(f"{folder}: this run kept its steps in memory (pool.name = 'memory'), so nothing is left of them to read")
    if name == "sqlite" and not (folder / "pool.db").exists():
        raise ConfigError(f"{folder}: this run has no pool.db yet, so there is nothing to read; start it first")
    return PoolLocation(name, folder, url)


@asynccontextmanager
async def open_pool_at(place: PoolLocation) -> AsyncGenerator[Pool]:
    """The pool, closed at the end."""
    pool: Pool = POOLS.load(place.name)(place.folder, url=place.url)
    try:
        yield pool
    finally:
        await pool.close()


def size_bytes(place: PoolLocation) -> int | None:
    """What the pool takes on disk; None where that cannot be told."""
    if place.name == "sqlite":
        files = (place.file, place.file.with_name("pool.db-wal"))
        return sum(file.stat().st_size for file in files if file.exists())
    if place.name != "postgres":
        return None
    tables = "relnamespace = current_schema()::regnamespace AND relkind = 'r'"
    query = f"SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE {tables}"
    with _connected(place) as database:
        return int(database.execute(query).fetchone()[0] or 0)


def check(place: PoolLocation, told: Told) -> Checked:
    """Read every row with its checksum and hold the tables against each other."""
    if place.name == "sqlite":
        return check_file(place.file, told)
    if place.name != "postgres":
        raise ConfigError(f"pool.name = {place.name!r}: only sqlite and postgres can be verified")
    with _connected(place) as database:
        database.begin_reading()
        return check_database(database, told)


class Compacted(NamedTuple):
    """The size of the file before and after."""

    before: int
    after: int


def compact(place: PoolLocation) -> Compacted:
    """Rewrite a SQLite pool without its gaps; refused while another process has it open."""
    if place.name != "sqlite":
        raise ConfigError(
            f"pool.name = {place.name!r}: only a SQLite file is compacted by hand; PostgreSQL does it by itself (autovacuum)"
        )
    before = size_bytes(place) or 0
    try:
        with closing(open_database(place.file)) as database:
            database.execute(f"PRAGMA busy_timeout = {int(ALONE_S * 1000)}")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            _hold(database, place)
            try:
                database.execute("VACUUM")
            finally:
                database.execute("PRAGMA journal_mode = WAL").fetchone()
    except FAULTS as cause:
        raise explain(cause, place.file) from cause
    return Compacted(before, size_bytes(place) or 0)


def _hold(database: sqlite3.Connection, place: PoolLocation) -> None:
    """Leave the write-ahead log, which SQLite grants to one who is alone with the file."""
    try:
        mode: str = database.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    except sqlite3.OperationalError as cause:
        if cause.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        mode = "wal"
    if mode != "delete":
        raise PoolError(
            f"{place.file}: another process has it open; stop the training, gateway or report that reads it, then compact"
        )


def _section(folder: Path) -> PoolSection | None:
    """What the folder's config says of its pool; None where it has none, as a checkpoint's, which is a model's."""
    try:
        settings: Any = orjson.loads((folder / "config.json").read_bytes())
        pool = settings["config"]["pool"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return validate(PoolSection, pool, str(folder / "config.json"))


@contextmanager
def _connected(place: PoolLocation) -> Generator[Database]:
    """A connection to a PostgreSQL pool, which needs a driver that not everyone has."""
    from penstock.pool import postgres

    try:
        with closing(postgres.PostgresDatabase(place.url, postgres.schema_name(place.folder.resolve().name))) as database:
            yield database
    except postgres.FAULTS as cause:
        raise postgres.explain(cause, place.url) from cause
