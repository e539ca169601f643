"""The queue: runs as they were submitted, where they stand, and how they ended. A run's files lie in a folder of its own."""

import re
import secrets
import sqlite3
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, Literal

import orjson

from penstock.controller.database import ControllerDatabase
from penstock.errors import ControllerError

RunKind = Literal["eval", "train"]

TABLE = """CREATE TABLE IF NOT EXISTS runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, kind TEXT NOT NULL, status TEXT NOT NULL,
    submission TEXT NOT NULL, created_at TEXT NOT NULL, started_at TEXT, ended_at TEXT, stop_asked INTEGER NOT NULL DEFAULT 0,
    launches INTEGER NOT NULL DEFAULT 0, message TEXT NOT NULL DEFAULT '', UNIQUE (kind, name))"""
INDEXES = (
    "CREATE INDEX IF NOT EXISTS runs_by_kind ON runs (kind, seq)",
    "CREATE INDEX IF NOT EXISTS runs_by_status ON runs (status, seq)",
)


class RunStatus(StrEnum):
    """Where a run stands; a platform's words, so that any client of it can tell them."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self in (RunStatus.FINISHED, RunStatus.FAILED, RunStatus.STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a run was submitted with."""

    rollout: str
    """Name of the rollout's folder, or of the project."""
    entrypoint: str
    model: str
    dataset: str
    """Its name."""
    dataset_digest: str
    """SHA-256 of the tasks that are run."""
    snapshot: str
    """SHA-256 of the code."""
    tables: dict[str, Any]
    """The tables of the file, as they were submitted."""
    repository: str = ""
    """owner/name, where the code came from one."""
    branch: str | None = None
    commit_sha: str | None = None
    dirty: bool = False
    """Whether the code differed from that commit."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    """Scope of each secret by its name: `user`, `workspace`, or `user_override` where both scopes have one. Never a value."""
    creator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run in the queue."""

    id: str
    name: str
    """Unique among runs of its kind; letters, digits, `_` and `-` only."""
    kind: RunKind
    status: RunStatus
    submission: Submission
    created_at: str
    started_at: str | None = None
    ended_at: str | None = None
    stop_asked: bool = False
    launches: int = 0
    """How often a process was started for it."""
    message: str = ""
    """Why it failed or was stopped, in a line."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run, whichever process asks for them."""

    path: Path

    @property
    def code(self) -> Path:
        """The snapshot, unpacked; where the run's process works."""
        return self.path / "code"

    @property
    def config(self) -> Path:
        """The whole config of the run as `penstock train` takes it: JSON, absolute paths."""
        return self.path / "config.json"

    @property
    def job(self) -> Path:
        """What its keeper starts: JSON without secrets."""
        return self.path / "job.json"

    @property
    def lock(self) -> Path:
        """Held by the keeper as long as it lives."""
        return self.path / "keeper.lock"

    @property
    def end(self) -> Path:
        """How its process ended, written once and before the lock is given back: JSON `{code, ended_at, stopped, message}`."""
        return self.path / "exit.json"

    @property
    def stop(self) -> Path:
        """Made before the keeper is told to end: without it, its keeper was ended by others and the run is taken up again."""
        return self.path / "stop"

    @property
    def log(self) -> Path:
        """What its process said: a line of JSON `{timestamp, level, step, message, details}` for each line."""
        return self.path / "log.jsonl"

    @property
    def out(self) -> Path:
        """Where the run's own folder is made: `out/<name>` of training, `out/evals/<name>` of an evaluation."""
        return self.path / "out"

    def results(self, run: Run) -> Path:
        """The run's own folder, as `penstock train` and `penstock eval run` write it."""
        return self.out / "evals" / run.name if run.kind == "eval" else self.out / run.name


class RunQueue:
    """The queue's rows. Each change is one durable statement that holds only from the states it may start in."""

    def __init__(self, database: ControllerDatabase) -> None:
        self._database = database
        database.create(TABLE, *INDEXES)

    def free_name(self, kind: RunKind, wanted: str) -> str:
        """`wanted` as a run's name, with a number where it is taken. One process admits runs, so it stays free until `add`."""
        base = re.sub(r"[^a-z0-9_-]+", "-", wanted.lower())[:80].strip("-_") or "run"
        found = self._database.rows("SELECT name FROM runs WHERE kind = ? AND name LIKE ? || '%'", [kind, base])
        taken = {row["name"] for row in found}
        return next(name for number in count(1) if (name := base if number == 1 else f"{base}-{number}") not in taken)

    def add(self, kind: RunKind, run_id: str, name: str, submission: Submission) -> Run:
        """Queue a run whose files are laid out under its id: from here on it is carried out, whatever is killed."""
        self._database.write(
            "INSERT INTO runs (id, kind, status, submission, created_at, name) VALUES (?, ?, ?, ?, ?, ?)",
            [run_id, kind, RunStatus.PENDING, orjson.dumps(asdict(submission)).decode(), now(), name],
        )
        return self.get(kind, run_id)

    def get(self, kind: RunKind, ref: str) -> Run:
        """By id or name."""
        found = self._database.row(
            "SELECT * FROM runs WHERE kind = ? AND (id = ? OR name = ?) ORDER BY id = ? DESC", [kind, ref, ref, ref]
        )
        if found is None:
            word = "evaluation" if kind == "eval" else "training run"
            raise ControllerError(f"there is no {word} {ref!r}; see: penstock {kind} list", code="RUN_NOT_FOUND", status=404)
        return _run(found)

    def page(self, kind: RunKind, *, limit: int, offset: int) -> tuple[list[Run], int]:
        """Newest first, and how many there are in all."""
        found = self._database.rows("SELECT * FROM runs WHERE kind = ? ORDER BY seq DESC LIMIT ? OFFSET ?", [kind, limit, offset])
        total = self._database.rows("SELECT count(*) FROM runs WHERE kind = ?", [kind])[0][0]
        return [_run(row) for row in found], total

    def waiting(self, limit: int = -1) -> list[Run]:
        """Those that no process was started for, oldest first; all of them, or up to `limit`."""
        found = self._database.rows("SELECT * FROM runs WHERE status = 'pending' ORDER BY seq LIMIT ?", [limit])
        return [_run(row) for row in found]

    def count_waiting(self) -> int:
        """How many those are."""
        return self._database.rows("SELECT count(*) FROM runs WHERE status = 'pending'")[0][0]

    def running(self) -> list[Run]:
        """Those that a process was started for and that are not over, oldest first."""
        return [_run(row) for row in self._database.rows("SELECT * FROM runs WHERE status = 'running' ORDER BY seq")]

    def launch(self, run_id: str) -> bool:
        """Note that a process is about to be started; False where the run is over or was asked to stop."""
        statement = """UPDATE runs SET status = 'running', launches = launches + 1, started_at = coalesce(started_at, ?)
            WHERE id = ? AND status IN ('pending', 'running') AND stop_asked = 0"""
        return self._database.write(statement, [now(), run_id]) == 1

    def ask_stop(self, run_id: str) -> bool:
        """Ask for an end; one that waits is over at once. False where it was over before."""
        statement = """UPDATE runs SET stop_asked = 1, message = 'stopped on request',
            ended_at = CASE status WHEN 'pending' THEN ? ELSE ended_at END,
            status = CASE status WHEN 'pending' THEN 'stopped' ELSE status END
            WHERE id = ? AND status IN ('pending', 'running')"""
        return self._database.write(statement, [now(), run_id]) == 1

    def finish(self, run_id: str, status: RunStatus, message: str = "", *, ended_at: str | None = None) -> bool:
        """Note how it ended; the first word stands."""
        statement = "UPDATE runs SET status = ?, message = ?, ended_at = ? WHERE id = ? AND status IN ('pending', 'running')"
        return self._database.write(statement, [status, message, ended_at or now(), run_id]) == 1


def new_id() -> str:
    """An id that no other run has."""
    return secrets.token_hex(8)


def now() -> str:
    """This moment, with its zone, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _run(row: sqlite3.Row) -> Run:
    fields: dict[str, Any] = dict(zip(row.keys(), row, strict=True))
    del fields["seq"]
    fields["submission"] = Submission(**orjson.loads(fields["submission"]))
    fields["status"], fields["stop_asked"] = RunStatus(fields["status"]), bool(fields["stop_asked"])
    return Run(**fields)
