"""A rollout server's journal on disk: the rollouts that it accepted, their states, and results still to be delivered.

    queued ──▶ running ──▶ grading ──▶ success │ failure │ cancelled ──▶ settled

Every change is one transaction, on disk before the server acts on it. A result is written once: the first one counts.
"""

import os
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.errors import ConfigError, PoolError
from penstock.pool.base import PoolDatabase
from penstock.pool.sqlite import SqliteDatabase
from penstock.pool.writer import Writer
from penstock.system.files import FileLock
from penstock_compat.rollout_server.protocol import RolloutState

DEFAULT_PATH = Path(".penstock/rollouts.db")
MAX_SETTLED = 10_000
"""Settled rollouts that are kept, to answer status requests and to recognize repeated requests."""
VERSION = 1

SCHEMA = """
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    request BLOB,
    state TEXT NOT NULL DEFAULT 'queued',
    message TEXT NOT NULL DEFAULT '',
    completion BLOB,
    completion_sent TEXT,
    grade BLOB,
    grade_sent TEXT,
    settled INTEGER
);
CREATE INDEX rollouts_settled ON rollouts (settled);
"""
"""A result's `_sent` is NULL until its delivery has ended; then it is empty if the result was accepted, else the reason."""


UNFINISHED = (RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.GRADING)
_UNFINISHED = "state IN ('queued', 'running', 'grading')"

Part = Literal["completion", "grade"]
"""The two results of a rollout; also the names of their columns."""


class JournalEntry(NamedTuple):
    """A rollout's row."""

    id: str
    request: bytes | None
    """None once the rollout is settled."""
    state: RolloutState
    message: str
    completion: bytes | None
    completion_sent: str | None
    grade: bytes | None
    grade_sent: str | None


_MESSAGE = "coalesce(nullif(message, ''), nullif(completion_sent, ''), nullif(grade_sent, ''), '')"
"""Why it failed, else why its result was not accepted."""
_COLUMNS = ", ".join(JournalEntry._fields)


class JournalStatus(NamedTuple):
    """The reply to a status request."""

    state: RolloutState
    message: str


class Journal:
    """Open it with `open_journal`."""

    def __init__(self, database: PoolDatabase, lock: FileLock | None, *, max_settled: int = MAX_SETTLED) -> None:
        self.is_durable = lock is not None
        """Whether it outlives the process."""
        self._lock = lock
        self._max_settled = max_settled
        self._writer = Writer(database, _explain)

    async def close(self) -> None:
        """Finishes pending writes and releases the lock."""
        await self._writer.close()
        if self._lock:
            self._lock.close()

    async def accept(self, rollout_id: str, digest: str, request: bytes) -> Literal["new", "same", "other"]:
        """Stores a rollout. Returns `same` if the same request was accepted before, `other` if another one has this id."""

        def write(database: PoolDatabase) -> Literal["new", "same", "other"]:
            known = database.execute("SELECT digest FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
            if known is not None:
                return "same" if known[0] == digest else "other"
            database.execute("INSERT INTO rollouts (id, digest, request) VALUES (?, ?, ?)", (rollout_id, digest, request))
            return "new"

        return await self._writer.submit(write)

    async def start(self, rollout_id: str) -> bool:
        """Notes that its workflow is about to run. Returns False if it has ended."""
        return await self._update("UPDATE rollouts SET state = 'running' WHERE id = ? AND state = 'queued'", rollout_id)

    async def complete(self, rollout_id: str, state: RolloutState, message: str, completion: bytes) -> bool:
        """Stores how the workflow ended. Returns False if that is stored already."""
        sql = "UPDATE rollouts SET state = ?, message = ?, completion = ? WHERE id = ? AND completion IS NULL"
        return await self._update(sql, state, _text(message), completion, rollout_id)

    async def grade(self, rollout_id: str, state: RolloutState, message: str, grade: bytes) -> bool:
        """Stores how the grader ended, or that it was not run. Returns False if that is stored already."""
        sql = "UPDATE rollouts SET state = ?, message = ?, grade = ? WHERE id = ? AND completion IS NOT NULL AND grade IS NULL"
        return await self._update(sql, state, _text(message), grade, rollout_id)

    async def end(self, rollout_id: str, state: RolloutState, message: str, completion: bytes, grade: bytes | None) -> bool:
        """Ends an unfinished rollout; stored results stay, missing ones become these. Returns False if it had ended."""
        sql = (
            "UPDATE rollouts SET state = ?, message = ?, completion = coalesce(completion, ?), grade = coalesce(grade, ?) "
            f"WHERE id = ? AND {_UNFINISHED}"
        )
        return await self._update(sql, state, _text(message), completion, grade, rollout_id)

    async def sent(self, rollout_id: str, part: Part, reason: str) -> None:
        """Notes that the delivery of a result has ended; an empty reason means that it was accepted."""
        await self._update(f"UPDATE rollouts SET {part}_sent = ? WHERE id = ?", reason, rollout_id)

    async def settle(self, rollout_id: str, *, keep: bool = False) -> None:
        """Deletes the request, which holds keys, and the results; beyond `max_settled`, deletes the oldest settled rollouts.

        With `keep`, the request and results stay: they could not be delivered, and the next start of the server tries again.
        """

        def write(database: PoolDatabase) -> None:
            last: int = database.execute("SELECT coalesce(max(settled), 0) FROM rollouts").fetchone()[0]
            cleared = "" if keep else ", request = NULL, completion = NULL, grade = NULL"
            database.execute(f"UPDATE rollouts SET settled = ?{cleared} WHERE id = ?", (last + 1, rollout_id))
            database.execute("DELETE FROM rollouts WHERE settled <= ?", (last + 1 - self._max_settled,))

        await self._writer.submit(write)

    async def status(self, rollout_id: str) -> JournalStatus:
        def read(database: PoolDatabase) -> JournalStatus:
            row = database.execute(f"SELECT state, {_MESSAGE} FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
            return (
                JournalStatus(RolloutState(row[0]), row[1])
                if row
                else JournalStatus(RolloutState.UNKNOWN, "no rollout of this id is known here")
            )

        return await self._writer.submit(read)

    async def entry(self, rollout_id: str) -> JournalEntry:
        """Returns the row of an unsettled rollout."""
        entries = await self._entries("WHERE id = ?", rollout_id)
        if not entries:
            raise PoolError(f"rollout {rollout_id} is no longer in the journal; was the file changed by hand?")
        return entries[0]

    async def unsettled(self) -> list[JournalEntry]:
        """Returns the rollouts that are not settled, in the order in which they were accepted."""
        return await self._entries("WHERE request IS NOT NULL ORDER BY seq")

    async def _entries(self, where: str, *values: str) -> list[JournalEntry]:
        def read(database: PoolDatabase) -> list[JournalEntry]:
            rows = database.execute(f"SELECT {_COLUMNS} FROM rollouts {where}", values).fetchall()
            return [JournalEntry(*row)._replace(state=RolloutState(row[2])) for row in rows]

        return await self._writer.submit(read)

    async def _update(self, sql: str, *values: object) -> bool:
        return await self._writer.submit(lambda database: database.execute(sql, values).rowcount == 1)


def open_journal(path: Path | None, *, max_settled: int = MAX_SETTLED) -> Journal:
    """Opens the journal in this file, and makes it if needed; None keeps one in memory.

    Raises ConfigError if it cannot be used, or if another server uses it. The file is readable by its owner only: requests hold
    keys.
    """
    if path is None:
        return Journal(_open(":memory:"), None, max_settled=max_settled)
    with ExitStack() as stack:
        try:
            _make_folder(path.parent)
            lock = stack.enter_context(FileLock(Path(f"{path}.lock")))
            if not lock.try_acquire():
                raise ConfigError(f"{path}: another rollout server uses this journal; stop it, or give another journal")
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            journal = Journal(_open(str(path)), lock, max_settled=max_settled)
        except (OSError, sqlite3.Error) as cause:
            raise ConfigError(f"{path}: cannot be used as a rollout server's journal: {cause}; give another journal") from cause
        stack.pop_all()
        return journal


def _open(name: str) -> PoolDatabase:
    database = sqlite3.connect(name, isolation_level=None, check_same_thread=False, factory=SqliteDatabase)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA secure_delete = ON")  # deleted keys are overwritten with zeros
        version: int = database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            database.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise ConfigError(f"{name}: a journal of another version ({version}, not {VERSION}); give another journal")
    except BaseException:
        database.close()
        raise
    return database


def _make_folder(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")  # keys must not get into version control


def _text(message: str) -> str:
    # SQLite stores valid UTF-8 only: lone surrogates are replaced.
    return message.encode("utf-8", "replace").decode()


def _explain(cause: Exception) -> Exception:
    return PoolError(f"the rollout server's journal failed: {cause}") if isinstance(cause, sqlite3.Error) else cause
