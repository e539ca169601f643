"""Datasets and their uploads in the database. Each change is one transaction, and holds only for the upload it was made for."""

import re
import secrets
import sqlite3
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson

from penstock.controller.database import Database
from penstock.controller.dataset_logs import DatasetLogs
from penstock.controller.runs import new_id, now
from penstock.errors import ControllerError, DatasetError, Issue

TABLES = (
    """CREATE TABLE IF NOT EXISTS datasets (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE, extension TEXT NOT NULL,
    size INTEGER NOT NULL, status TEXT NOT NULL, digest TEXT, rows INTEGER, created_at TEXT NOT NULL, updated_at TEXT NOT NULL,
    message TEXT NOT NULL DEFAULT '', creator TEXT NOT NULL DEFAULT '')""",
    """CREATE TABLE IF NOT EXISTS uploads (
    dataset TEXT PRIMARY KEY REFERENCES datasets (id), key TEXT NOT NULL UNIQUE, extension TEXT NOT NULL, size INTEGER NOT NULL,
    state TEXT NOT NULL, begun_at TEXT NOT NULL, digest TEXT, error TEXT)""",
)
NAME = re.compile(r"(?!\.)[^\x00-\x1f\x7f/\\]{1,200}")
EXTENSIONS = ("csv", "jsonl", "parquet")
FORGOTTEN = timedelta(days=1)
"""After which an upload that nobody completed is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What a name stands for."""

    id: str
    name: str
    extension: str
    size: int
    """In bytes."""
    status: str
    """`pending`, `uploading`, `processing`; then `uploaded`, or `error` or `cancelled` where no content ever came."""
    digest: str | None
    """SHA-256 of the content; None before there is any."""
    rows: int | None
    created_at: str
    updated_at: str
    message: str = ""
    """Why there is no content."""
    creator: str = ""
    path: Path = Path()
    """Of the content, where there is some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A file on its way to a dataset."""

    dataset: str
    """Its id."""
    key: str
    """Of this upload alone: a link to an earlier one is worth nothing."""
    extension: str
    size: int
    state: str
    """`pending`, `uploading`, `received`, `processing`, `failed`."""
    begun_at: str
    digest: str | None = None
    """Once it was received."""
    error: str | None = None
    """What is wrong with the file, as JSON."""


class DatasetRows:
    """The two tables, and the log beside them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(*TABLES)
        self.logs = DatasetLogs(database)

    def find(self, ref: str) -> Dataset | None:
        """By id or name."""
        row = self._database.row("SELECT * FROM datasets WHERE id = ? OR name = ? ORDER BY id = ? DESC", [ref, ref, ref])
        return None if row is None else _dataset(row)

    def page(self, *, limit: int, offset: int) -> tuple[list[Dataset], int]:
        """Newest first, and how many there are in all."""
        found = self._database.rows("SELECT * FROM datasets ORDER BY seq DESC LIMIT ? OFFSET ?", [limit, offset])
        return [_dataset(row) for row in found], self._database.rows("SELECT count(*) FROM datasets")[0][0]

    def uploads(self, dataset: str | None = None) -> list[Upload]:
        """What is on its way, to one dataset or to all."""
        where, values = ("", []) if dataset is None else (" WHERE dataset = ?", [dataset])
        return [_upload(row) for row in self._database.rows(f"SELECT * FROM uploads{where}", values)]

    def begin(self, name: str, size: int, extension: str, *, overwrite_id: str | None, creator: str) -> Upload:
        """Expect a file; the upload that was expected before is forgotten. ControllerError 409 for a name that has content."""
        with self._database.transaction():
            known = self.find(name)
            if overwrite_id is not None and (known is None or overwrite_id not in (known.id, known.name)):
                raise refused(f"dataset {overwrite_id[:80]!r} is not the one that is called {name!r}", "overwrite_dataset_id")
            if known is not None and known.digest is not None and overwrite_id is None:
                text = f"a dataset {name!r} exists; choose another name, or overwrite it"
                raise ControllerError(text, code="DATASET_EXISTS", status=409, details={"existing_dataset_id": known.id})
            dataset = known.id if known else self._insert(name, size, extension, creator)
            upload = Upload(
                dataset=dataset, key=secrets.token_hex(16), extension=extension, size=size, state="pending", begun_at=now()
            )
            self._database.write(
                "INSERT OR REPLACE INTO uploads (dataset, key, extension, size, state, begun_at) VALUES (?, ?, ?, ?, ?, ?)",
                [dataset, upload.key, extension, size, upload.state, upload.begun_at],
            )
            self._show(upload, "pending")
            self.logs.add(dataset, "upload", f"a {extension} file of {size} bytes is expected")
        return upload

    def move(self, upload: Upload, state: str) -> Upload:
        """Note how far an upload is; ControllerError 409 where it is no longer the one that is expected."""
        with self._database.transaction():
            self._write(upload, "UPDATE uploads SET state = ? WHERE key = ? AND error IS NULL", [state, upload.key])
            self._show(upload, "uploading" if state == "received" else state)
        return replace(upload, state=state)

    def received(self, upload: Upload, digest: str) -> None:
        """Note that its file is whole, and waits."""
        with self._database.transaction():
            statement = "UPDATE uploads SET state = 'received', digest = ? WHERE key = ? AND state NOT IN ('processing', 'failed')"
            self._write(upload, statement, [digest, upload.key])
            self._show(upload, "uploading")
            self.logs.add(upload.dataset, "upload", f"{upload.size} bytes received", sha256=digest)

    def lost(self, upload: Upload) -> None:
        """Note that its file is not there after all, and must be sent again."""
        with self._database.transaction():
            self._write(upload, "UPDATE uploads SET state = 'pending', digest = NULL WHERE key = ?", [upload.key])
            self._show(upload, "pending")

    def settle(self, upload: Upload, rows: int) -> None:
        """The file is in its place: from here on the dataset's name stands for it."""
        with self._database.transaction():
            self._write(upload, "DELETE FROM uploads WHERE key = ?", [upload.key])
            self._database.write(
                """UPDATE datasets SET extension = ?, size = ?, digest = ?, rows = ?, updated_at = ?, status = 'uploaded',
                message = '' WHERE id = ?""",
                [upload.extension, upload.size, upload.digest, rows, now(), upload.dataset],
            )
            self.logs.add(upload.dataset, "validation", f"{rows} rows, all of them good", rows=rows)

    def fail(self, upload: Upload, error: DatasetError) -> None:
        """The file cannot be used; content that was there before stays."""
        told = orjson.dumps({"message": str(error), "issues": error.issues}, default=list).decode()
        with self._database.transaction():
            self._write(upload, "UPDATE uploads SET state = 'failed', error = ? WHERE key = ?", [told, upload.key])
            self._show(upload, "error", str(error))
            for issue in error.issues:
                self.logs.add(upload.dataset, "validation", issue.message, level="error", where=issue.key)

    def cancel(self, upload: Upload, why: str) -> None:
        """Give an upload up; content that was there before stays."""
        with self._database.transaction():
            if self._database.write("DELETE FROM uploads WHERE key = ?", [upload.key]):
                self._show(upload, "cancelled", why)
                self.logs.add(upload.dataset, "upload", why, level="warning")

    def _insert(self, name: str, size: int, extension: str, creator: str) -> str:
        dataset, moment = new_id(), now()
        self._database.write(
            """INSERT INTO datasets (id, name, extension, size, status, created_at, updated_at, creator)
            VALUES (?, ?, ?, ?, 'pending', ?, ?, ?)""",
            [dataset, name, extension, size, moment, moment, creator],
        )
        return dataset

    def _write(self, upload: Upload, statement: str, values: list[str | int | None]) -> None:
        if not self._database.write(statement, values):
            raise over(upload.dataset)

    def _show(self, upload: Upload, status: str, message: str = "") -> None:
        """Show where an upload stands on a dataset that has no content yet."""
        self._database.write(
            "UPDATE datasets SET status = ?, message = ?, size = ?, extension = ?, updated_at = ? WHERE id = ? AND digest IS NULL",
            [status, message, upload.size, upload.extension, now(), upload.dataset],
        )


def is_forgotten(upload: Upload) -> bool:
    """Whether nobody will complete it any more."""
    return datetime.now(UTC) - datetime.fromisoformat(upload.begun_at) > FORGOTTEN


def error_of(told: str) -> DatasetError:
    """The error that `DatasetRows.fail` kept."""
    kept = orjson.loads(told)
    return DatasetError(kept["message"], [Issue(*issue) for issue in kept["issues"]])


def check_wish(name: str, size: int, extension: str, *, largest: int) -> None:
    """ControllerError 400 for a dataset that cannot be."""
    if not NAME.fullmatch(name) or name.strip() != name:
        raise refused(f"{name[:80]!r} is not a dataset's name; use a file's name without its ending", "file_name")
    if extension not in EXTENSIONS:
        raise refused(f"a dataset is a csv, jsonl or parquet file, not {extension[:20]!r}; convert it", "extension")
    if not 0 < size <= largest:
        limit = f"from 1 byte to {largest // 1_000_000} MB"
        raise refused(f"dataset {name!r} has {size} bytes; this controller takes files {limit}", "file_size")


def over(dataset: str) -> ControllerError:
    """An upload that came too late."""
    text = f"nothing is expected for dataset {dataset} by this link any more; begin the upload again"
    return ControllerError(text, code="UPLOAD_OVER", status=409)


def refused(message: str, field: str) -> ControllerError:
    """A wish that cannot be."""
    return ControllerError(message, code="DATASET_INVALID", status=400, details={"field": field})


def _dataset(row: sqlite3.Row) -> Dataset:
    return Dataset(**{key: row[key] for key in row.keys() if key != "seq"})  # noqa: SIM118


def _upload(row: sqlite3.Row) -> Upload:
    return Upload(**{key: row[key] for key in row.keys()})  # noqa: SIM118
