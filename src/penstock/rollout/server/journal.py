"""What a rollout server has promised, on disk: rollouts it accepted, how far each is, and results that are still to be delivered.

    queued ──▶ running ──▶ grading ──▶ success │ failure │ cancelled ──▶ settled

Every change is one transaction and on disk before it is acted on. A result is written once: whoever comes second finds it there.
"""

import os
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.errors import ConfigError, PoolError
from penstock.pool.sql.database import PoolDatabase
from penstock.pool.sql.sqlite import SqliteDatabase
from penstock.pool.writer import Writer
from penstock.rollout.server.protocol import State
from penstock.system.locks import FileLock

PLACE = Path(".penstock/rollouts.db")
KEPT = 10_000
"""Rollouts that are over and still known: their status, and that a request for one came before."""
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
"""A result's `_sent` is NULL until its delivery has ended, then how: empty if it was taken, else the reason why it was not."""


UNENDED = (State.QUEUED, State.RUNNING, State.GRADING)
_UNENDED = "state IN ('queued', 'running', 'grading')"

Part = Literal["completion", "grade"]
"""The two results of a rollout; also the names of their columns."""


class Entry(NamedTuple):
    """A rollout as the journal knows it."""

    id: str
    request: bytes | None
    """None once nothing is left to do with it."""
    state: State
    message: str
    completion: bytes | None
    completion_sent: str | None
    grade: bytes | None
    grade_sent: str | None


_MESSAGE = "coalesce(nullif(message, ''), nullif(completion_sent, ''), nullif(grade_sent, ''), '')"
"""Why it failed, else why its result was not taken."""
_COLUMNS = ", ".join(Entry._fields)


class Standing(NamedTuple):
    """What is told of a rollout to whoever asks."""

    state: State
    message: str


class Journal:
    """One server's journal; open it with `open_journal`."""

    def __init__(self, database: PoolDatabase, lock: FileLock | None, *, kept: int = KEPT) -> None:
        self.lasting = lock is not None
        """Whether it is there after the process has ended."""
        self._lock = lock
        self._kept = kept
        self._writer = Writer(database, _explain)

    async def close(self) -> None:
        """Finish what is being written and let others open it."""
        await self._writer.close()
        if self._lock:
            self._lock.close()

    async def accept(self, rollout_id: str, digest: str, request: bytes) -> Literal["new", "same", "other"]:
        """Promise to run it; `same` where that was promised before, `other` where another request has this id."""

        def write(database: PoolDatabase) -> Literal["new", "same", "other"]:
            known = database.execute("SELECT digest FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
            if known is not None:
                return "same" if known[0] == digest else "other"
            database.execute("INSERT INTO rollouts (id, digest, request) VALUES (?, ?, ?)", (rollout_id, digest, request))
            return "new"

        return await self._writer.submit(write)

    async def start(self, rollout_id: str) -> bool:
        """Note that its workflow is about to run; False where it has ended before."""
        return await self._change("UPDATE rollouts SET state = 'running' WHERE id = ? AND state = 'queued'", rollout_id)

    async def complete(self, rollout_id: str, state: State, message: str, completion: bytes) -> bool:
        """Keep how the workflow ended; False where its end is known already."""
        sql = "UPDATE rollouts SET state = ?, message = ?, completion = ? WHERE id = ? AND completion IS NULL"
        return await self._change(sql, state, _text(message), completion, rollout_id)

    async def grade(self, rollout_id: str, state: State, message: str, grade: bytes) -> bool:
        """Keep how the grader ended, or that it was not asked; False where that is known already."""
        sql = "UPDATE rollouts SET state = ?, message = ?, grade = ? WHERE id = ? AND completion IS NOT NULL AND grade IS NULL"
        return await self._change(sql, state, _text(message), grade, rollout_id)

    async def end(self, rollout_id: str, state: State, message: str, completion: bytes, grade: bytes | None) -> bool:
        """End what has not ended; of its results, those that are not known yet become these. False where it had ended."""
        sql = (
            "UPDATE rollouts SET state = ?, message = ?, completion = coalesce(completion, ?), grade = coalesce(grade, ?) "
            f"WHERE id = ? AND {_UNENDED}"
        )
        return await self._change(sql, state, _text(message), completion, grade, rollout_id)

    async def sent(self, rollout_id: str, part: Part, reason: str) -> None:
        """Note that the delivery of a result has ended; an empty reason says that it was taken."""
        await self._change(f"UPDATE rollouts SET {part}_sent = ? WHERE id = ?", reason, rollout_id)

    async def settle(self, rollout_id: str, *, keep: bool = False) -> None:
        """Nothing is left to do: forget the request with its keys, and the results; and, beyond `kept`, the oldest rollouts.

        With `keep`, results could not be delivered: they stay, for the next start of the server to try again.
        """

        def write(database: PoolDatabase) -> None:
            last: int = database.execute("SELECT coalesce(max(settled), 0) FROM rollouts").fetchone()[0]
            what = "" if keep else ", request = NULL, completion = NULL, grade = NULL"
            database.execute(f"UPDATE rollouts SET settled = ?{what} WHERE id = ?", (last + 1, rollout_id))
            database.execute("DELETE FROM rollouts WHERE settled <= ?", (last + 1 - self._kept,))

        await self._writer.submit(write)

    async def find(self, rollout_id: str) -> Standing:
        """How far it is."""

        def read(database: PoolDatabase) -> Standing:
            row = database.execute(f"SELECT state, {_MESSAGE} FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
            return Standing(State(row[0]), row[1]) if row else Standing(State.UNKNOWN, "no rollout of this id is known here")

        return await self._writer.submit(read)

    async def entry(self, rollout_id: str) -> Entry:
        """All that is known of a rollout that is not settled."""
        found = await self._entries("WHERE id = ?", rollout_id)
        if not found:
            raise PoolError(f"rollout {rollout_id} is no longer in the journal; was the file changed by hand?")
        return found[0]

    async def unsettled(self) -> list[Entry]:
        """What is left to do, in the order in which it was accepted."""
        return await self._entries("WHERE request IS NOT NULL ORDER BY seq")

    async def _entries(self, where: str, *values: str) -> list[Entry]:
        def read(database: PoolDatabase) -> list[Entry]:
            rows = database.execute(f"SELECT {_COLUMNS} FROM rollouts {where}", values).fetchall()
            return [Entry(*row)._replace(state=State(row[2])) for row in rows]

        return await self._writer.submit(read)

    async def _change(self, sql: str, *values: object) -> bool:
        return await self._writer.submit(lambda database: database.execute(sql, values).rowcount == 1)


def open_journal(path: Path | None, *, kept: int = KEPT) -> Journal:
    """The journal in this file, made where there is none; None keeps one in memory, which ends with the process.

    ConfigError where it cannot be used, or another server does. Only its owner can read it: requests hold keys.
    """
    if path is None:
        return Journal(_opened(":memory:"), None, kept=kept)
    with ExitStack() as stack:
        try:
            _make_folder(path.parent)
            lock = stack.enter_context(FileLock(Path(f"{path}.lock")))
            if not lock.try_acquire():
                raise ConfigError(f"{path}: another rollout server uses this journal; stop it, or give another journal")
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            journal = Journal(_opened(str(path)), lock, kept=kept)
        except (OSError, sqlite3.Error) as cause:
            raise ConfigError(f"{path}: cannot be used as a rollout server's journal: {cause}; give another journal") from cause
        stack.pop_all()
        return journal


def _opened(name: str) -> PoolDatabase:
    database = sqlite3.connect(name, isolation_level=None, check_same_thread=False, factory=SqliteDatabase)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA secure_delete = ON")  # keys that are no longer needed leave no trace
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
    """Make the folder; one that we make is kept out of version control."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")


def _text(message: str) -> str:
    """SQLite takes no half characters."""
    return message.encode("utf-8", "replace").decode()


def _explain(cause: Exception) -> Exception:
    return PoolError(f"the rollout server's journal failed: {cause}") if isinstance(cause, sqlite3.Error) else cause
