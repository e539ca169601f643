"""The shared pool: the tables of a run in a schema of a PostgreSQL database. Only opening one needs psycopg."""

import hashlib
import importlib
import re
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from penstock.errors import ConfigError
from penstock.pool.base import CheckProgress
from penstock.pool.check import PoolCheck, check_database
from penstock.pool.rules import Clock, LeaseClock
from penstock.pool.sql.pool import SqlPool

if TYPE_CHECKING:
    from penstock.pool.sql.postgres import PostgresDatabase

READERS = 2
"""Connections for reading, so that a long report leaves one for the others."""


class PostgresPool(SqlPool):
    """Opens the pool of the run that `folder` is named after, in the database at `url`, and creates its tables if needed."""

    name: ClassVar[str] = "postgres"

    def __init__(self, folder: Path, *, url: str = "", clock: Clock = time.monotonic) -> None:
        from penstock.pool.sql import postgres

        self.check_url(url)
        schema = schema_name(folder.resolve().name)
        explain = partial(postgres.explain, url=url)
        with ExitStack() as stack:
            try:
                writing = stack.enter_context(closing(postgres.PostgresDatabase(url, schema)))
                postgres.migrate(writing, schema)
                reading = [stack.enter_context(closing(postgres.PostgresDatabase(url, schema))) for _ in range(READERS)]
                notifier = postgres.PostgresNotifier(partial(postgres.connect, url, schema), schema)
                stack.callback(notifier.close)
                super().__init__(writing, reading, LeaseClock(clock), explain, notifier)
            except postgres.FAULTS as cause:
                raise explain(cause) from cause
            stack.pop_all()

    @classmethod
    def check_url(cls, url: str) -> None:
        if not url:
            raise ConfigError("pool.name = 'postgres' needs pool.url, for example 'postgresql://user@host/penstock'")
        if urlsplit(url).password:
            raise ConfigError("pool.url holds a password, which would be stored with the run; leave it to PGPASSWORD or ~/.pgpass")
        importlib.import_module("penstock.pool.sql.postgres")  # a missing driver is refused here, before a run begins

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
        from penstock.pool.sql import postgres

        postgres.rename_schema(url, schema_name(before), schema_name(after))


def schema_name(run: str) -> str:
    """Return the schema of a run: its name if that is a plain identifier, otherwise the name with a digest."""
    plain = re.sub(r"[^a-z0-9_]", "_", run.lower())[:40]
    digest = "" if plain == run else f"_{hashlib.sha256(run.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
    return f"penstock_{plain}{digest}"


@contextmanager
def _connected(folder: Path, url: str) -> Generator["PostgresDatabase"]:
    from penstock.pool.sql import postgres

    try:
        with closing(postgres.PostgresDatabase(url, schema_name(folder.resolve().name))) as database:
            yield database
    except postgres.FAULTS as cause:
        raise postgres.explain(cause, url) from cause
