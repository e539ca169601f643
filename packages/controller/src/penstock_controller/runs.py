"""The run queue: submissions, their status and how they ended; and each run's files, such as job.json and exit.json."""

import re
import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, Self

import orjson

from penstock.config import RunKind
from penstock.errors import ControllerError
from penstock.system.files import write_file
from penstock.system.sandbox import SandboxWish
from penstock_controller.database import ControllerDatabase
from penstock_controller.identity import OWNER

TABLE = """CREATE TABLE IF NOT EXISTS runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, kind TEXT NOT NULL, status TEXT NOT NULL,
    submission TEXT NOT NULL, created_at TEXT NOT NULL, started_at TEXT, ended_at TEXT, stop_asked INTEGER NOT NULL DEFAULT 0,
    launches INTEGER NOT NULL DEFAULT 0, message TEXT NOT NULL DEFAULT '', UNIQUE (kind, name))"""
INDEXES = (
    "CREATE INDEX IF NOT EXISTS runs_by_kind ON runs (kind, seq)",
    "CREATE INDEX IF NOT EXISTS runs_by_status ON runs (status, seq)",
)


class RunStatus(StrEnum):
    """Status of a run, in the platform API's words."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return self in (RunStatus.FINISHED, RunStatus.FAILED, RunStatus.STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a run was submitted with."""

    rollout: str
    """Name of the rollout's folder, or of the run in a run config."""
    entrypoint: str
    model: str
    dataset: str
    dataset_digest: str
    """SHA-256 of the dataset file."""
    snapshot: str
    """SHA-256 of the code archive."""
    tables: dict[str, Any]
    """The submitted tables of the experiment file or run config."""
    repository: str = ""
    """owner/name; empty if unknown."""
    branch: str | None = None
    commit_sha: str | None = None
    dirty: bool = False
    """Whether the code differed from that commit."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    """Scope of each secret by name: `user`, `workspace`, or `user_override` if both scopes have one. Never a value."""
    creator: str = ""
    person: str = OWNER
    """Who submitted it: whose secrets it gets, and who may stop it besides the owner."""


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
    """How many times a process was started for it."""
    message: str = ""
    """Why it failed or was stopped, in one line."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of one run's files."""

    path: Path

    @property
    def code(self) -> Path:
        """The unpacked snapshot; working directory of the run's process."""
        return self.path / "code"

    @property
    def config(self) -> Path:
        """The complete run config for `penstock train` or `penstock eval run`: JSON, absolute paths."""
        return self.path / "config.json"

    @property
    def tasks(self) -> Path:
        """Uploaded datasets that the run reads, as links to the controller's files."""
        return self.path / "tasks"

    @property
    def job(self) -> Path:
        """What the monitor starts: JSON without secrets."""
        return self.path / "job.json"

    @property
    def lock(self) -> Path:
        """Locked by the monitor while it lives. An older version chose the file's name; its monitors may still run."""
        return self.path / "keeper.lock"

    @property
    def end(self) -> Path:
        """How the process ended, written once, before the lock is released: JSON `{code, ended_at, stopped, message}`."""
        return self.path / "exit.json"

    @property
    def stop(self) -> Path:
        """Created before the monitor gets SIGTERM. A monitor that ends without it was ended by others: the run is restarted."""
        return self.path / "stop"

    @property
    def log(self) -> Path:
        """Output of the process: a JSON line `{timestamp, level, step, message, details}` per line."""
        return self.path / "log.jsonl"

    @property
    def out(self) -> Path:
        """Parent of the run folder: `out/<name>` for training, `out/evals/<name>` for an evaluation."""
        return self.path / "out"

    def holds(self, path: Path) -> bool:
        """Whether a path of the run leads to something inside its folder. The run's code may have put links there."""
        return path.resolve().is_relative_to(self.path.resolve())

    def results(self, run: Run) -> Path:
        """The run folder that `penstock train` or `penstock eval run` writes."""
        return self.out / "evals" / run.name if run.kind == "eval" else self.out / run.name


class RunQueue:
    """The rows of the queue. Each transition is one UPDATE that applies only in the states that allow it, so races are harmless."""

    def __init__(self, database: ControllerDatabase) -> None:
        self._database = database
        database.create(TABLE, *INDEXES)

    def free_name(self, kind: RunKind, requested: str) -> str:
        """Returns `requested` as a valid, unused name, numbered if it is taken. Call it in the transaction of `add`."""
        base = re.sub(r"[^a-z0-9_-]+", "-", requested.lower())[:80].strip("-_") or "run"
        found = self._database.rows("SELECT name FROM runs WHERE kind = ? AND name LIKE ? || '%'", [kind, base])
        taken = {row["name"] for row in found}
        return next(name for number in count(1) if (name := base if number == 1 else f"{base}-{number}") not in taken)

    def add(self, kind: RunKind, run_id: str, name: str, submission: Submission) -> Run:
        """Queues a run whose files are complete. From here on it will be executed, even if the controller is killed."""
        self._database.write(
            "INSERT INTO runs (id, kind, status, submission, created_at, name) VALUES (?, ?, ?, ?, ?, ?)",
            [run_id, kind, RunStatus.PENDING, orjson.dumps(asdict(submission)).decode(), now(), name],
        )
        return self.get(kind, run_id)

    def get(self, kind: RunKind, ref: str) -> Run:
        """Returns the run with this id or name; ControllerError 404 if there is none."""
        found = self._database.row(
            "SELECT * FROM runs WHERE kind = ? AND (id = ? OR name = ?) ORDER BY id = ? DESC", [kind, ref, ref, ref]
        )
        if found is None:
            word = "evaluation" if kind == "eval" else "training run"
            raise ControllerError(f"there is no {word} {ref!r}; see: penstock {kind} list", code="RUN_NOT_FOUND", status=404)
        return _run(found)

    def page(self, kind: RunKind, *, limit: int, offset: int) -> tuple[list[Run], int]:
        """Returns a page of runs, newest first, and the total count."""
        found = self._database.rows("SELECT * FROM runs WHERE kind = ? ORDER BY seq DESC LIMIT ? OFFSET ?", [kind, limit, offset])
        total = self._database.rows("SELECT count(*) FROM runs WHERE kind = ?", [kind])[0][0]
        return [_run(row) for row in found], total

    def waiting(self, limit: int = -1) -> list[Run]:
        """Returns pending runs, oldest first; all of them if `limit` is negative."""
        found = self._database.rows("SELECT * FROM runs WHERE status = 'pending' ORDER BY seq LIMIT ?", [limit])
        return [_run(row) for row in found]

    def count_waiting(self) -> int:
        return self._database.rows("SELECT count(*) FROM runs WHERE status = 'pending'")[0][0]

    def running(self) -> list[Run]:
        """Returns runs that have started and not ended, oldest first."""
        return [_run(row) for row in self._database.rows("SELECT * FROM runs WHERE status = 'running' ORDER BY seq")]

    def launch(self, run_id: str) -> bool:
        """Records that a process is about to start; False if the run has ended or its stop was requested."""
        statement = """UPDATE runs SET status = 'running', launches = launches + 1, started_at = coalesce(started_at, ?)
            WHERE id = ? AND status IN ('pending', 'running') AND stop_asked = 0"""
        return self._database.write(statement, [now(), run_id]) == 1

    def request_stop(self, run_id: str) -> bool:
        """Requests a stop; a pending run ends at once. False if the run has ended already."""
        statement = """UPDATE runs SET stop_asked = 1, message = 'stopped on request',
            ended_at = CASE status WHEN 'pending' THEN ? ELSE ended_at END,
            status = CASE status WHEN 'pending' THEN 'stopped' ELSE status END
            WHERE id = ? AND status IN ('pending', 'running')"""
        return self._database.write(statement, [now(), run_id]) == 1

    def finish(self, run_id: str, status: RunStatus, message: str = "", *, ended_at: str | None = None) -> bool:
        """Records how the run ended; False if that was recorded before."""
        statement = "UPDATE runs SET status = ?, message = ?, ended_at = ? WHERE id = ? AND status IN ('pending', 'running')"
        return self._database.write(statement, [status, message, ended_at or now(), run_id]) == 1


def new_id() -> str:
    return secrets.token_hex(8)


def now() -> str:
    """Returns the current UTC time in ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _run(row: sqlite3.Row) -> Run:
    fields: dict[str, Any] = dict(zip(row.keys(), row, strict=True))
    del fields["seq"]
    fields["submission"] = Submission(**orjson.loads(fields["submission"]))
    fields["status"], fields["stop_asked"] = RunStatus(fields["status"]), bool(fields["stop_asked"])
    return Run(**fields)


INHERITED_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH",
    "PENSTOCK_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
"""Variables that a run inherits from the controller, besides `LC_*`: locations and settings, no credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """The process that a monitor starts. Holds no secrets."""

    argv: list[str]
    """The interpreter comes first; it is replaced if the project needs its own virtual environment."""
    cwd: str
    env: dict[str, str] = field(default_factory=dict[str, str])
    stop_grace_s: float = 60.0
    """Time between SIGINT and SIGKILL."""
    project: str = ""
    """Folder whose pyproject.toml lists requirements; empty if there are none."""
    environments: str = ""
    """Folder of the virtual environments."""
    log_mb: float = 256.0
    """Limit of the log file; further lines are dropped."""
    sandbox: SandboxWish = "auto"
    """The sandbox that the submission was accepted for."""
    trusted: bool = True
    """Whether the owner has submitted it."""
    checkpoint: str = ""
    """Folder of another run's weights that it begins with; empty if there is none."""

    @classmethod
    def read(cls, files: RunFiles) -> Self:
        return cls(**orjson.loads(files.job.read_bytes()))

    def write(self, files: RunFiles) -> None:
        write_file(files.job, orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How a run's process ended."""

    code: int
    """Exit code; negative is the signal that ended it."""
    stopped: bool
    """Whether the stop was requested."""
    message: str = ""
    """Why it failed: the last output line that looks like an error. Empty if it succeeded or was stopped."""
    ended_at: str = field(default_factory=now)

    @classmethod
    def read(cls, files: RunFiles) -> Self | None:
        """Returns None if the process has not ended."""
        try:
            return cls(**orjson.loads(files.end.read_bytes()))
        except FileNotFoundError:
            return None

    def write(self, files: RunFiles) -> None:
        """Marks the run as ended."""
        write_file(files.end, orjson.dumps(asdict(self)))


def process_environment(inherited_from: Mapping[str, str], own: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a run's process: inherited variables of `inherited_from`, then `own`, then secrets.

    PENSTOCK_SECRETS lists the names of the secrets.
    """
    inherited = {name: value for name, value in inherited_from.items() if name in INHERITED_VARIABLES or name.startswith("LC_")}
    added = {"PYTHONUNBUFFERED": "1"} | ({"PENSTOCK_SECRETS": ",".join(sorted(secrets))} if secrets else {})
    return inherited | dict(own) | added | dict(secrets)
