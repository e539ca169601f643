"""The controller's datasets: upload, validation and storage of their files, by name and by SHA-256.

An upload goes through `begin`, `receive` and `complete`. `complete` validates every row, and only then replaces the dataset's
content: until that, and if the new file is invalid, the old content stays. A controller that was killed continues where it stopped.
"""

import asyncio
import errno
import hashlib
import re
import secrets
import shutil
import sqlite3
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Generator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from penstock.errors import ControllerError, DatasetError, Issue
from penstock.sdk.dataset import check_tasks, read_rows
from penstock.system.files import publish, sync
from penstock_controller.database import ControllerDatabase
from penstock_controller.identity import OWNER, THE_OWNER, Identity, require_own
from penstock_controller.runs import new_id, now

NAME = re.compile(r"(?!\.)[^\x00-\x1f\x7f/\\]{1,200}")
EXTENSIONS = ("csv", "jsonl", "parquet")
MAX_DATASET_MB = 5000
CHECK_WAIT_S = 20.0
"""How long `complete` waits for the validation, since clients wait 30 s; a longer one continues as `processing`."""
UPLOAD_LIFETIME = timedelta(days=1)
"""An upload that is not completed in this time is cancelled at the next start."""
PREVIEW_ROWS, PREVIEW_CHARS = 50, 4000
"""Limits of a preview: rows, and characters of one value."""
BLOCK_BYTES = 1 << 20
"""Bytes per write."""
Level = Literal["info", "warning", "error"]
Step = Literal["upload", "validation"]
DATASET_TABLES = (
    """CREATE TABLE IF NOT EXISTS datasets (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE, extension TEXT NOT NULL,
    size INTEGER NOT NULL, status TEXT NOT NULL, digest TEXT, rows INTEGER, created_at TEXT NOT NULL, updated_at TEXT NOT NULL,
    message TEXT NOT NULL DEFAULT '', creator TEXT NOT NULL DEFAULT '')""",
    """CREATE TABLE IF NOT EXISTS uploads (
    dataset TEXT PRIMARY KEY REFERENCES datasets (id), key TEXT NOT NULL UNIQUE, extension TEXT NOT NULL, size INTEGER NOT NULL,
    state TEXT NOT NULL, begun_at TEXT NOT NULL, digest TEXT, error TEXT)""",
)
LOGS_TABLE = """CREATE TABLE IF NOT EXISTS dataset_logs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, dataset TEXT NOT NULL, timestamp TEXT NOT NULL, level TEXT NOT NULL, step TEXT NOT NULL,
    message TEXT NOT NULL, details TEXT)"""
LOGS_INDEX = "CREATE INDEX IF NOT EXISTS dataset_logs_of ON dataset_logs (dataset, seq)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A dataset and its current content."""

    id: str
    name: str
    extension: str
    size: int
    """In bytes."""
    status: str
    """`uploaded` once there is content; else that of the upload: `pending`, `uploading`, `processing`, `error`, `cancelled`."""
    digest: str | None
    """SHA-256 of the content; None if there is none yet."""
    rows: int | None
    created_at: str
    updated_at: str
    message: str = ""
    """Why there is no content yet."""
    creator: str = ""
    person: str = OWNER
    """Who may replace the content, besides the owner."""
    path: Path = Path()
    """The file with the content, if there is any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An upload in progress; a dataset has at most one."""

    dataset: str
    """The dataset's id."""
    key: str
    """Unique per upload, so that links to an earlier one become invalid."""
    extension: str
    size: int
    state: str
    """`pending`, `uploading`, `received`, `processing`, `failed`."""
    begun_at: str
    digest: str | None = None
    """SHA-256; None until the file is received."""
    error: str | None = None
    """Why the file is invalid, as JSON."""


class Datasets:
    """All datasets. Files are validated in threads, one at a time; validation that `close` or a kill interrupted is repeated."""

    def __init__(
        self, database: ControllerDatabase, folder: Path, *, max_mb: int = MAX_DATASET_MB, check_wait_s: float = CHECK_WAIT_S
    ) -> None:
        self._tables, self._files = DatasetTables(database), DatasetFiles(folder)
        self._max_bytes, self._check_wait_s = max_mb * 1_000_000, check_wait_s
        self._check_lock, self._commit_lock = threading.Lock(), threading.Lock()
        self._checks: dict[str, Future[None]] = {}
        self._closing = False
        self.logs = self._tables.logs
        self._recover()

    def close(self) -> None:
        """Discards the results of validations that still run, since the database is closed next."""
        with self._commit_lock:
            self._closing = True

    def get(self, ref: str) -> Dataset:
        """Returns the dataset with this id or name; ControllerError 404 if there is none."""
        found = self._tables.find(ref)
        if found is None:
            text = f"there is no dataset {ref[:200]!r}; see: penstock dataset list"
            raise ControllerError(text, code="DATASET_NOT_FOUND", status=404)
        return self._with_path(found)

    def page(self, *, limit: int, offset: int) -> tuple[list[Dataset], int]:
        """Returns a page of datasets, newest first, and the total count."""
        found, total = self._tables.page(limit=limit, offset=offset)
        return [self._with_path(each) for each in found], total

    def upload(self, ref: str) -> Upload | None:
        """Returns a dataset's upload in progress, or None."""
        return next(iter(self._tables.uploads(self.get(ref).id)), None)

    def begin(self, name: str, size: int, extension: str, overwrite_id: str | None = None, *, who: Identity = THE_OWNER) -> Dataset:
        """Starts an upload to a new dataset of `who`, or to `overwrite_id`, whose content stays until `complete`.

        ControllerError 409 for a name in use has `existing_dataset_id` in its details; 403 if the dataset is another's.
        """
        check_new_dataset(name, size, extension, max_bytes=self._max_bytes)
        before = self._tables.find(name)
        replaced = self._tables.uploads(before.id) if before else []
        upload = self._tables.begin(name, size, extension, overwrite_id=overwrite_id, who=who)
        for each in replaced:
            self._files.discard(each.key)
        return self._as_uploaded(upload)

    async def receive(self, dataset_id: str, stream: AsyncIterable[bytes], *, key: str | None = None) -> None:
        """Stores a file of exactly the announced size. It may be sent again until `complete`.

        `key` is that of the upload which the client's link was made for.
        """
        upload = self._open_upload(dataset_id, key)
        self._tables.set_state(upload, "uploading")
        try:
            digest = await self._files.receive(upload, stream)
        except BaseException as error:
            if not self._is_current(upload) and isinstance(error, ControllerError):
                raise upload_over(dataset_id) from error
            if self._is_current(upload):
                self._tables.set_state(upload, upload.state)
            raise
        await asyncio.to_thread(self._set_received, upload, digest)

    async def complete(self, dataset_id: str, extension: str | None = None) -> Dataset:
        """Validates the file and makes it the content; DatasetError if it is invalid. Idempotent."""
        upload = self.upload(dataset_id)
        known = self.get(dataset_id)  # read after the upload: a validation that ends in between changes both
        if upload is None:
            return _require_content(known)
        if upload.error is not None:
            raise stored_error(upload.error)
        if extension is not None and extension.lower().lstrip(".") != upload.extension:
            raise invalid_dataset(
                f"dataset {known.name!r} was begun as {upload.extension}, not {extension[:20]!r}", "file_extension"
            )
        if upload.digest is None:
            text = f"dataset {known.name!r}: its file has not arrived; upload it first"
            raise ControllerError(text, code="UPLOAD_MISSING", status=409)
        try:
            check = asyncio.wrap_future(self._begin_check(upload))
        except ControllerError:
            if self.upload(dataset_id) == upload:
                raise
            return await self.complete(dataset_id, extension)  # the validation of another call has just ended
        done, _ = await asyncio.wait({check}, timeout=self._check_wait_s)
        if not done:
            # asyncio would log an exception that nobody retrieves
            check.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return self._as_uploaded(replace(upload, state="processing"))
        check.result()
        return self.get(known.id)

    def abort(self, dataset_id: str) -> Dataset:
        """Cancels the upload; earlier content stays. Idempotent."""
        known = self.get(dataset_id)
        for upload in self._tables.uploads(known.id):
            self._tables.cancel(upload, "the upload was cancelled")
            self._files.discard(upload.key)
        return self.get(known.id)

    def add_file(self, path: Path, name: str, *, overwrite: bool = False, who: Identity = THE_OWNER) -> Dataset:
        """Stores a copy of a local file, validated like an upload; does nothing if the dataset has that content.

        Blocks until the validation has ended: call it in a thread.
        """
        extension, known = path.suffix.lower().lstrip("."), self._tables.find(name)
        if not path.is_file():
            raise DatasetError(f"{path}: no such file; check the path")
        if known is not None and known.digest is not None and (known.digest, known.extension) == (file_sha256(path), extension):
            return self._with_path(known)
        replaced = known.id if overwrite and known is not None else None
        dataset = self.begin(name, path.stat().st_size, extension, replaced, who=who)
        upload = self._open_upload(dataset.id, None)
        self._set_received(upload, self._files.copy(upload, path))
        self._begin_check(self._open_upload(dataset.id, upload.key)).result()
        return self.get(dataset.id)

    def _recover(self) -> None:
        """Continues where a killed controller stopped: cancels old uploads, removes stray files, restarts validations."""
        for upload in self._tables.uploads():
            if is_abandoned(upload):
                self._tables.cancel(upload, "the upload was never completed")
            elif upload.digest is not None and upload.error is None and self._files.find(upload, upload.digest) is None:
                self._tables.set_lost(upload)
            elif upload.state == "uploading":
                self._tables.set_state(upload, "pending" if upload.digest is None else "received")
        waiting = [(each, each.digest) for each in self._tables.uploads() if each.digest is not None and each.error is None]
        self._files.remove_drafts_except({self._files.draft(upload, digest) for upload, digest in waiting})
        for upload, _ in waiting:
            if upload.state == "processing":
                self._begin_check(upload)

    def _open_upload(self, dataset_id: str, key: str | None) -> Upload:
        upload = self.upload(dataset_id)
        if upload is None or upload.state in ("processing", "failed") or (key is not None and key != upload.key):
            raise upload_over(dataset_id)
        return upload

    def _set_received(self, upload: Upload, digest: str) -> None:
        try:
            self._tables.set_received(upload, digest)
        except ControllerError:
            if not self._is_current(upload):
                self._files.discard(upload.key)
            raise

    def _begin_check(self, upload: Upload) -> "Future[None]":
        """Returns the running validation of an upload, or starts one."""
        running = self._checks.get(upload.key)
        if running is None:
            processing, running = self._tables.set_state(upload, "processing"), Future[None]()
            self._checks[upload.key] = running
            threading.Thread(target=self._run_check, args=(processing, running), name="dataset-check", daemon=True).start()
        return running

    def _run_check(self, upload: Upload, result: "Future[None]") -> None:
        try:
            with self._check_lock:
                self._check(upload)
        except Exception as error:
            result.set_exception(error)
        else:
            result.set_result(None)
        finally:
            self._checks.pop(upload.key, None)

    def _check(self, upload: Upload) -> None:
        """Validates a received file and makes it the content, or records why it is invalid."""
        with self._commit_lock:
            self._check_open()
            name, file = self.get(upload.dataset).name, self._files.find(upload, str(upload.digest))
            if file is None:
                self._tables.set_lost(upload)
                raise ControllerError(f"dataset {name!r}: its file is gone; upload it again", code="UPLOAD_MISSING", status=409)
        invalid, rows = None, 0
        try:
            rows = check_dataset(file, f"{name}.{upload.extension}")
        except DatasetError as error:
            invalid = error
        with self._commit_lock:
            self._check_open()
            if invalid is None:  # the file first: a kill between the two leaves an unused file, not a dataset without one
                self._files.keep(upload, str(upload.digest))
                self._tables.finish(upload, rows)
                return
            self._tables.fail(upload, invalid)
            self._files.discard(upload.key)
            raise invalid

    def _check_open(self) -> None:
        if self._closing:
            text = "the controller stopped while it looked at the file; complete the upload again"
            raise ControllerError(text, code="CONTROLLER_STOPPING", status=503)

    def _is_current(self, upload: Upload) -> bool:
        return any(each.key == upload.key for each in self._tables.uploads(upload.dataset))

    def _as_uploaded(self, upload: Upload) -> Dataset:
        """Returns the dataset with the upload's state, size and extension."""
        return replace(self.get(upload.dataset), status=upload.state, size=upload.size, extension=upload.extension)

    def _with_path(self, dataset: Dataset) -> Dataset:
        return dataset if dataset.digest is None else replace(dataset, path=self._files.content(dataset.digest, dataset.extension))


def _require_content(dataset: Dataset) -> Dataset:
    """Returns a dataset without an upload; ControllerError 409 if it has no content."""
    if dataset.digest is None:
        text = f"dataset {dataset.name!r}: {dataset.message or 'nothing was uploaded'}; begin the upload again"
        raise ControllerError(text, code="UPLOAD_OVER", status=409)
    return dataset


def check_new_dataset(name: str, size: int, extension: str, *, max_bytes: int) -> None:
    """Raises ControllerError 400 for an invalid name, extension or size."""
    if not NAME.fullmatch(name) or name.strip() != name:
        raise invalid_dataset(f"{name[:80]!r} is not a dataset's name; use a file's name without its ending", "file_name")
    if extension not in EXTENSIONS:
        raise invalid_dataset(f"a dataset is a csv, jsonl or parquet file, not {extension[:20]!r}; convert it", "extension")
    if not 0 < size <= max_bytes:
        limit = f"from 1 byte to {max_bytes // 1_000_000} MB"
        raise invalid_dataset(f"dataset {name!r} has {size} bytes; this controller takes files {limit}", "file_size")


def is_abandoned(upload: Upload) -> bool:
    return datetime.now(UTC) - datetime.fromisoformat(upload.begun_at) > UPLOAD_LIFETIME


def upload_over(dataset: str) -> ControllerError:
    text = f"nothing is expected for dataset {dataset} by this link any more; begin the upload again"
    return ControllerError(text, code="UPLOAD_OVER", status=409)


def invalid_dataset(message: str, field: str) -> ControllerError:
    return ControllerError(message, code="DATASET_INVALID", status=400, details={"field": field})


# Validation of a file.


def check_dataset(path: Path, name: str) -> int:
    """Returns the number of rows; DatasetError has an issue for each invalid row, with `name` in place of the path.

    Only what every agent needs is checked. The columns that one agent needs are checked when a run is submitted.
    """
    try:
        return check_tasks(path, columns=True)
    except DatasetError as error:
        issues = [_with_public_name(issue, path, name) for issue in error.issues]
        first = str(error).partition("\n")[0].replace(str(path), name)
        raise DatasetError(first, issues or [Issue(name, first.removeprefix(f"{name}: "))]) from None


def preview(path: Path) -> list[dict[str, Any]]:
    """Returns the first rows as JSON values, long ones truncated."""
    with closing(read_rows(path)) as rows:
        return [{name: _truncate(value) for name, value in row.columns.items()} for row in islice(rows, PREVIEW_ROWS)]


def _with_public_name(issue: Issue, path: Path, name: str) -> Issue:
    """Removes the controller's path and the repeated key from an issue's message."""
    message = issue.message.removeprefix(f"{path}, {issue.key}: ").replace(str(path), name)
    return Issue(issue.key.replace(str(path), name), message)


def _truncate(value: Any) -> Any:
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    if len(text) > PREVIEW_CHARS:
        return f"{text[:PREVIEW_CHARS]}…"
    return value if isinstance(value, str) else orjson.loads(text)


# Tables and log.


class DatasetTables:
    """The tables of datasets and uploads, and their log."""

    def __init__(self, database: ControllerDatabase) -> None:
        self._database = database
        database.create(*DATASET_TABLES)
        database.add_column("datasets", f"person TEXT NOT NULL DEFAULT '{OWNER}'")
        self.logs = DatasetLogs(database)

    def find(self, ref: str) -> Dataset | None:
        """Returns the dataset with this id or name, or None."""
        row = self._database.row("SELECT * FROM datasets WHERE id = ? OR name = ? ORDER BY id = ? DESC", [ref, ref, ref])
        return None if row is None else _dataset(row)

    def page(self, *, limit: int, offset: int) -> tuple[list[Dataset], int]:
        """Returns a page of datasets, newest first, and the total count."""
        found = self._database.rows("SELECT * FROM datasets ORDER BY seq DESC LIMIT ? OFFSET ?", [limit, offset])
        return [_dataset(row) for row in found], self._database.rows("SELECT count(*) FROM datasets")[0][0]

    def uploads(self, dataset: str | None = None) -> list[Upload]:
        """Returns the uploads in progress, of one dataset or of all."""
        where, values = ("", []) if dataset is None else (" WHERE dataset = ?", [dataset])
        return [_upload(row) for row in self._database.rows(f"SELECT * FROM uploads{where}", values)]

    def begin(self, name: str, size: int, extension: str, *, overwrite_id: str | None, who: Identity) -> Upload:
        """Starts an upload in place of an earlier one. ControllerError 409 if the dataset has content and is not overwritten."""
        with self._database.transaction():
            known = self.find(name)
            if overwrite_id is not None and (known is None or overwrite_id not in (known.id, known.name)):
                raise invalid_dataset(
                    f"dataset {overwrite_id[:80]!r} is not the one that is called {name!r}", "overwrite_dataset_id"
                )
            if known is not None and known.digest is not None and overwrite_id is None:
                text = f"a dataset {name!r} exists; choose another name, or overwrite it"
                raise ControllerError(text, code="DATASET_EXISTS", status=409, details={"existing_dataset_id": known.id})
            if known is not None:
                require_own(who, known.person, f"the dataset {name!r}")
            dataset = known.id if known else self._insert(name, size, extension, who)
            upload = Upload(
                dataset=dataset, key=secrets.token_hex(16), extension=extension, size=size, state="pending", begun_at=now()
            )
            self._database.write(
                "INSERT OR REPLACE INTO uploads (dataset, key, extension, size, state, begun_at) VALUES (?, ?, ?, ?, ?, ?)",
                [dataset, upload.key, extension, size, upload.state, upload.begun_at],
            )
            self._show_state(upload, "pending")
            self.logs.add(dataset, "upload", f"a {extension} file of {size} bytes is expected")
        return upload

    def set_state(self, upload: Upload, state: str) -> Upload:
        """Sets an upload's state; ControllerError 409 if it was replaced, failed or cancelled."""
        with self._database.transaction():
            self._write(upload, "UPDATE uploads SET state = ? WHERE key = ? AND error IS NULL", [state, upload.key])
            self._show_state(upload, "uploading" if state == "received" else state)
        return replace(upload, state=state)

    def set_received(self, upload: Upload, digest: str) -> None:
        """Records that the file is complete and waits for validation."""
        with self._database.transaction():
            statement = "UPDATE uploads SET state = 'received', digest = ? WHERE key = ? AND state NOT IN ('processing', 'failed')"
            self._write(upload, statement, [digest, upload.key])
            self._show_state(upload, "uploading")
            self.logs.add(upload.dataset, "upload", f"{upload.size} bytes received", sha256=digest)

    def set_lost(self, upload: Upload) -> None:
        """Records that the file is missing and must be sent again."""
        with self._database.transaction():
            self._write(upload, "UPDATE uploads SET state = 'pending', digest = NULL WHERE key = ?", [upload.key])
            self._show_state(upload, "pending")

    def finish(self, upload: Upload, rows: int) -> None:
        """Makes the uploaded file the dataset's content."""
        with self._database.transaction():
            self._write(upload, "DELETE FROM uploads WHERE key = ?", [upload.key])
            self._database.write(
                """UPDATE datasets SET extension = ?, size = ?, digest = ?, rows = ?, updated_at = ?, status = 'uploaded',
                message = '' WHERE id = ?""",
                [upload.extension, upload.size, upload.digest, rows, now(), upload.dataset],
            )
            self.logs.add(upload.dataset, "validation", f"{rows} rows, all of them good", rows=rows)

    def fail(self, upload: Upload, error: DatasetError) -> None:
        """Records that the file is invalid; earlier content stays."""
        encoded = orjson.dumps({"message": str(error), "issues": error.issues}, default=list).decode()
        with self._database.transaction():
            self._write(upload, "UPDATE uploads SET state = 'failed', error = ? WHERE key = ?", [encoded, upload.key])
            self._show_state(upload, "error", str(error))
            for issue in error.issues:
                self.logs.add(upload.dataset, "validation", issue.message, level="error", where=issue.key)

    def cancel(self, upload: Upload, why: str) -> None:
        """Removes an upload; earlier content stays."""
        with self._database.transaction():
            if self._database.write("DELETE FROM uploads WHERE key = ?", [upload.key]):
                self._show_state(upload, "cancelled", why)
                self.logs.add(upload.dataset, "upload", why, level="warning")

    def _insert(self, name: str, size: int, extension: str, who: Identity) -> str:
        dataset, moment = new_id(), now()
        self._database.write(
            """INSERT INTO datasets (id, name, extension, size, status, created_at, updated_at, creator, person)
            VALUES (?, ?, ?, ?, 'pending', ?, ?, ?, ?)""",
            [dataset, name, extension, size, moment, moment, who.label, who.person],
        )
        return dataset

    def _write(self, upload: Upload, statement: str, values: list[str | int | None]) -> None:
        if not self._database.write(statement, values):
            raise upload_over(upload.dataset)

    def _show_state(self, upload: Upload, status: str, message: str = "") -> None:
        """Copies an upload's state to its dataset if that has no content yet."""
        self._database.write(
            "UPDATE datasets SET status = ?, message = ?, size = ?, extension = ?, updated_at = ? WHERE id = ? AND digest IS NULL",
            [status, message, upload.size, upload.extension, now(), upload.dataset],
        )


def stored_error(encoded: str) -> DatasetError:
    """Returns the error that `DatasetTables.fail` stored."""
    error = orjson.loads(encoded)
    return DatasetError(error["message"], [Issue(*issue) for issue in error["issues"]])


def _dataset(row: sqlite3.Row) -> Dataset:
    return Dataset(**{key: row[key] for key in row.keys() if key != "seq"})  # noqa: SIM118


def _upload(row: sqlite3.Row) -> Upload:
    return Upload(**{key: row[key] for key in row.keys()})  # noqa: SIM118


class DatasetLogPage(NamedTuple):
    """A page of log entries, oldest first."""

    entries: list[dict[str, Any]]
    next_cursor: str | None
    """Continues in the same direction. None if there is nothing older; never None for newer entries."""


class DatasetLogs:
    """The log entries of all datasets."""

    def __init__(self, database: ControllerDatabase) -> None:
        self._database = database
        database.create(LOGS_TABLE, LOGS_INDEX)

    def add(self, dataset: str, step: Step, message: str, *, level: Level = "info", **details: Any) -> None:
        encoded = orjson.dumps(details).decode() if details else None
        statement = "INSERT INTO dataset_logs (dataset, timestamp, level, step, message, details) VALUES (?, ?, ?, ?, ?, ?)"
        self._database.write(statement, [dataset, now(), level, step, message, encoded])

    def page(self, dataset: str, *, limit: int, cursor: str | None, newer: bool = False) -> DatasetLogPage:
        """Returns the newest entries, or those before `cursor`; with `newer`, the oldest ones, or those after `cursor`."""
        seq = _cursor_seq(cursor)
        side, order = (">", "ASC") if newer else ("<", "DESC")
        start = seq if seq is not None else (0 if newer else 1 << 62)
        statement = f"SELECT * FROM dataset_logs WHERE dataset = ? AND seq {side} ? ORDER BY seq {order} LIMIT ?"
        found = self._database.rows(statement, [dataset, start, limit + 1])  # one more shows whether there is a next page
        rows = found[:limit]
        end = str(rows[-1]["seq"]) if rows else str(start)
        next_cursor = end if newer or len(found) > limit else None
        fields = ("timestamp", "level", "step", "message")
        entries = [{name: row[name] for name in fields} | {"details": _details(row["details"])} for row in rows]
        return DatasetLogPage(entries if newer else entries[::-1], next_cursor)


def _cursor_seq(cursor: str | None) -> int | None:
    if cursor is None or cursor == "":
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):
        text = f"cursor {cursor[:40]!r} is not one that this controller gave"
        raise ControllerError(text, code="QUERY_INVALID", status=400, details={"field": "cursor"})
    return int(cursor)


def _details(text: str | None) -> dict[str, Any] | None:
    return None if text is None else orjson.loads(text)


# Files.


class DatasetFiles:
    """The folder with dataset files: content by SHA-256, and drafts of uploads (hidden files)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def content(self, digest: str, extension: str) -> Path:
        """Returns the path of the content with this SHA-256; it need not exist."""
        return self._folder / f"{digest}.{extension}"

    def draft(self, upload: Upload, digest: str) -> Path:
        """Returns the path of a received file that waits for validation."""
        return self._folder / f".{upload.key}.{digest}.{upload.extension}"

    def find(self, upload: Upload, digest: str) -> Path | None:
        """Returns an upload's file, as a draft or already as content; None if it is gone."""
        paths = (self.draft(upload, digest), self.content(digest, upload.extension))
        return next((path for path in paths if path.exists()), None)

    async def receive(self, upload: Upload, stream: AsyncIterable[bytes]) -> str:
        """Writes a stream to a draft and returns its SHA-256. A stream of another size than announced leaves nothing."""
        part = self._part(upload)
        with _remove_afterwards(part), _disk_errors():
            with part.open("xb", buffering=0) as file:
                digest = await _write_stream(file, _receive_errors(stream), upload.size)
            await asyncio.to_thread(sync, part)
            part.replace(self.draft(upload, digest))  # not in the thread: a cancelled upload must leave nothing
        return digest

    def copy(self, upload: Upload, source: Path) -> str:
        """Copies a local file to a draft and returns its SHA-256."""
        part = self._part(upload)
        with _remove_afterwards(part), _disk_errors():
            shutil.copyfile(source, part)
            digest = file_sha256(part)
            publish(part, self.draft(upload, digest))
        return digest

    def keep(self, upload: Upload, digest: str) -> None:
        """Makes a draft the content of its SHA-256, durably; does nothing if it was done before."""
        draft, content = self.draft(upload, digest), self.content(digest, upload.extension)
        with _disk_errors():
            if draft.exists():
                draft.replace(content)
            sync(self._folder)

    def discard(self, key: str) -> None:
        """Removes the drafts of an upload."""
        for file in self._folder.glob(f".{key}.*"):
            file.unlink(missing_ok=True)

    def remove_drafts_except(self, keep: set[Path]) -> None:
        """Removes drafts and partial files that a killed process left, except `keep`."""
        for file in self._folder.glob(".*"):
            if file not in keep:
                file.unlink(missing_ok=True)

    def _part(self, upload: Upload) -> Path:
        return self._folder / f".{upload.key}.{secrets.token_hex(4)}.part"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _write_stream(file: FileIO, stream: AsyncIterable[bytes], expected: int) -> str:
    """Writes `stream` in blocks, in a thread; returns its SHA-256. ControllerError 400 if it has not `expected` bytes."""
    digest, size, block = hashlib.sha256(), 0, bytearray()

    def flush() -> None:
        digest.update(block)
        written = 0
        while written < len(block):
            written += file.write(block[written:]) or 0
        block.clear()

    async for piece in stream:
        size += len(piece)
        if size > expected:
            break
        block += piece
        if len(block) >= BLOCK_BYTES:
            await asyncio.to_thread(flush)
    if size != expected:
        received = f"{size} came" if size < expected else "more came"
        text = f"the file was to have {expected} bytes, and {received}; upload it again as it is now"
        raise ControllerError(text, code="SIZE_MISMATCH", status=400)
    await asyncio.to_thread(flush)
    return digest.hexdigest()


async def _receive_errors(stream: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Passes on a client's stream; an OSError of the connection must not be reported as a disk error."""
    try:
        async for piece in stream:
            yield piece
    except OSError as cause:
        raise ControllerError("the upload broke off; send the file again", code="UPLOAD_BROKEN", status=400) from cause


@contextmanager
def _remove_afterwards(part: Path) -> Generator[None]:
    try:
        yield
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _disk_errors() -> Generator[None]:
    """Turns an OSError into a ControllerError."""
    try:
        yield
    except OSError as cause:
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        text = f"the file cannot be kept by the controller: {cause.strerror or cause}; free disk space there"
        raise ControllerError(text, code="DISK_FULL" if full else "STORE_FAILED", status=507) from cause
