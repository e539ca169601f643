"""A whole dataset file looked at: how many rows it has, or everything that is wrong with them; and its first rows."""

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
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from penstock.controller.database import ControllerDatabase
from penstock.controller.runs import new_id, now
from penstock.errors import ControllerError, DatasetError, Issue
from penstock.sdk.dataset import check_tasks, read_rows
from penstock.system.files import publish, sync

PREVIEW_ROWS, PREVIEW_CHARS = 50, 4000
"""Of a preview: rows, and characters of a value."""


def check_dataset(path: Path, name: str) -> int:
    """How many rows `path` has; DatasetError with an issue for each bad one, which calls the file `name`.

    A row must do for some agent: one with a prompt, or any row for a flow that asks by itself. What an agent needs beyond that is
    looked at when a run is submitted.
    """
    try:
        return check_tasks(path, columns=True)
    except DatasetError as error:
        issues = [_with_public_name(issue, path, name) for issue in error.issues]
        first = str(error).partition("\n")[0].replace(str(path), name)
        raise DatasetError(first, issues or [Issue(name, first.removeprefix(f"{name}: "))]) from None


def preview(path: Path) -> list[dict[str, Any]]:
    """The first rows as JSON can hold them, long values cut."""
    with closing(read_rows(path)) as rows:
        return [{name: _truncate(value) for name, value in row.columns.items()} for row in islice(rows, PREVIEW_ROWS)]


def _with_public_name(issue: Issue, path: Path, name: str) -> Issue:
    """The place is the issue's key already, and the path is the controller's own: neither belongs in the message."""
    message = issue.message.removeprefix(f"{path}, {issue.key}: ").replace(str(path), name)
    return Issue(issue.key.replace(str(path), name), message)


def _truncate(value: Any) -> Any:
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    if len(text) > PREVIEW_CHARS:
        return f"{text[:PREVIEW_CHARS]}…"
    return value if isinstance(value, str) else orjson.loads(text)


BLOCK_BYTES = 1 << 20
"""Bytes that are written at once."""


class Expected(Protocol):
    """What a file is to be."""

    @property
    def key(self) -> str:
        """Of its upload alone."""
        ...

    @property
    def extension(self) -> str: ...

    @property
    def size(self) -> int: ...


class DatasetFiles:
    """One folder of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def content(self, digest: str, extension: str) -> Path:
        """Where the file of this digest is, or would be, kept."""
        return self._folder / f"{digest}.{extension}"

    def draft(self, upload: Expected, digest: str) -> Path:
        """Where a whole upload waits to be looked at."""
        return self._folder / f".{upload.key}.{digest}.{upload.extension}"

    def find(self, upload: Expected, digest: str) -> Path | None:
        """An upload's file: waiting, or already in its place; None where it is gone."""
        places = (self.draft(upload, digest), self.content(digest, upload.extension))
        return next((place for place in places if place.exists()), None)

    async def receive(self, upload: Expected, stream: AsyncIterable[bytes]) -> str:
        """Write a file as it comes and have it wait as a draft; its digest. Nothing stays of one of another size."""
        part = self._part(upload)
        with _remove_afterwards(part), _disk_errors():
            with part.open("xb", buffering=0) as file:
                digest = await _write_stream(file, _receive_errors(stream), upload.size)
            await asyncio.to_thread(sync, part)
            part.replace(self.draft(upload, digest))  # not in the thread: a cancelled upload must leave nothing
        return digest

    def copy(self, upload: Expected, source: Path) -> str:
        """Have a copy of a file of this machine wait as a draft; its digest."""
        part = self._part(upload)
        with _remove_afterwards(part), _disk_errors():
            shutil.copyfile(source, part)
            digest = file_sha256(part)
            publish(part, self.draft(upload, digest))
        return digest

    def keep(self, upload: Expected, digest: str) -> None:
        """Put a draft in its place for good; one that is there already is left."""
        draft, content = self.draft(upload, digest), self.content(digest, upload.extension)
        with _disk_errors():
            if draft.exists():
                draft.replace(content)
            sync(self._folder)

    def discard(self, key: str) -> None:
        """Remove what waits of an upload."""
        for file in self._folder.glob(f".{key}.*"):
            file.unlink(missing_ok=True)

    def sweep(self, wanted: set[Path]) -> None:
        """Remove what a killed process left, but for drafts that can still be completed."""
        for file in self._folder.glob(".*"):
            if file not in wanted:
                file.unlink(missing_ok=True)

    def _part(self, upload: Expected) -> Path:
        return self._folder / f".{upload.key}.{secrets.token_hex(4)}.part"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _write_stream(file: FileIO, stream: AsyncIterable[bytes], wanted: int) -> str:
    digest, size, block = hashlib.sha256(), 0, bytearray()

    def flush() -> None:
        digest.update(block)
        written = 0
        while written < len(block):
            written += file.write(block[written:]) or 0
        block.clear()

    async for piece in stream:
        size += len(piece)
        if size > wanted:
            break
        block += piece
        if len(block) >= BLOCK_BYTES:
            await asyncio.to_thread(flush)
    if size != wanted:
        told = f"{size} came" if size < wanted else "more came"
        text = f"the file was to have {wanted} bytes, and {told}; upload it again as it is now"
        raise ControllerError(text, code="SIZE_MISMATCH", status=400)
    await asyncio.to_thread(flush)
    return digest.hexdigest()


async def _receive_errors(stream: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """What a caller sends; that it broke off is no fault of the disk."""
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
    """A disk that refuses, told once."""
    try:
        yield
    except OSError as cause:
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        text = f"the file cannot be kept by the controller: {cause.strerror or cause}; free disk space there"
        raise ControllerError(text, code="DISK_FULL" if full else "STORE_FAILED", status=507) from cause


LOGS_TABLE = """CREATE TABLE IF NOT EXISTS dataset_logs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, dataset TEXT NOT NULL, timestamp TEXT NOT NULL, level TEXT NOT NULL, step TEXT NOT NULL,
    message TEXT NOT NULL, details TEXT)"""
LOGS_INDEX = "CREATE INDEX IF NOT EXISTS dataset_logs_of ON dataset_logs (dataset, seq)"

Level = Literal["info", "warning", "error"]
Step = Literal["upload", "validation"]


class DatasetLogPage(NamedTuple):
    """Some entries, oldest first."""

    entries: list[dict[str, Any]]
    next_cursor: str | None
    """Leads further the same way; None at the beginning. Forwards it always says from where to ask again."""


class DatasetLogs:
    """The entries of all datasets."""

    def __init__(self, database: ControllerDatabase) -> None:
        self._database = database
        database.create(LOGS_TABLE, LOGS_INDEX)

    def add(self, dataset: str, step: Step, message: str, *, level: Level = "info", **details: Any) -> None:
        told = orjson.dumps(details).decode() if details else None
        statement = "INSERT INTO dataset_logs (dataset, timestamp, level, step, message, details) VALUES (?, ?, ?, ?, ?, ?)"
        self._database.write(statement, [dataset, now(), level, step, message, told])

    def page(self, dataset: str, *, limit: int, cursor: str | None, newer: bool = False) -> DatasetLogPage:
        """The newest entries, or those before (with `newer`: after) `cursor`; `newer` without a cursor begins at the beginning."""
        place = _cursor_seq(cursor)
        side, order = (">", "ASC") if newer else ("<", "DESC")
        start = place if place is not None else (0 if newer else 1 << 62)
        statement = f"SELECT * FROM dataset_logs WHERE dataset = ? AND seq {side} ? ORDER BY seq {order} LIMIT ?"
        found = self._database.rows(statement, [dataset, start, limit + 1])
        kept = found[:limit]
        end = str(kept[-1]["seq"]) if kept else str(start)
        following = end if newer or len(found) > limit else None
        rows = kept if newer else kept[::-1]
        fields = ("timestamp", "level", "step", "message")
        told = [{name: row[name] for name in fields} | {"details": _details(row["details"])} for row in rows]
        return DatasetLogPage(told, following)


def _cursor_seq(cursor: str | None) -> int | None:
    if cursor is None or cursor == "":
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):
        text = f"cursor {cursor[:40]!r} is not one that this controller gave"
        raise ControllerError(text, code="QUERY_INVALID", status=400, details={"field": "cursor"})
    return int(cursor)


def _details(text: str | None) -> dict[str, Any] | None:
    return None if text is None else orjson.loads(text)


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
UPLOAD_LIFETIME = timedelta(days=1)
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


class DatasetTables:
    """The two tables, and the log beside them."""

    def __init__(self, database: ControllerDatabase) -> None:
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
                raise invalid_dataset(
                    f"dataset {overwrite_id[:80]!r} is not the one that is called {name!r}", "overwrite_dataset_id"
                )
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
            raise upload_over(upload.dataset)

    def _show(self, upload: Upload, status: str, message: str = "") -> None:
        """Show where an upload stands on a dataset that has no content yet."""
        self._database.write(
            "UPDATE datasets SET status = ?, message = ?, size = ?, extension = ?, updated_at = ? WHERE id = ? AND digest IS NULL",
            [status, message, upload.size, upload.extension, now(), upload.dataset],
        )


def is_abandoned(upload: Upload) -> bool:
    """Whether nobody will complete it any more."""
    return datetime.now(UTC) - datetime.fromisoformat(upload.begun_at) > UPLOAD_LIFETIME


def stored_error(told: str) -> DatasetError:
    """The error that `DatasetRows.fail` kept."""
    kept = orjson.loads(told)
    return DatasetError(kept["message"], [Issue(*issue) for issue in kept["issues"]])


def check_new_dataset(name: str, size: int, extension: str, *, largest: int) -> None:
    """ControllerError 400 for a dataset that cannot be."""
    if not NAME.fullmatch(name) or name.strip() != name:
        raise invalid_dataset(f"{name[:80]!r} is not a dataset's name; use a file's name without its ending", "file_name")
    if extension not in EXTENSIONS:
        raise invalid_dataset(f"a dataset is a csv, jsonl or parquet file, not {extension[:20]!r}; convert it", "extension")
    if not 0 < size <= largest:
        limit = f"from 1 byte to {largest // 1_000_000} MB"
        raise invalid_dataset(f"dataset {name!r} has {size} bytes; this controller takes files {limit}", "file_size")


def upload_over(dataset: str) -> ControllerError:
    """An upload that came too late."""
    text = f"nothing is expected for dataset {dataset} by this link any more; begin the upload again"
    return ControllerError(text, code="UPLOAD_OVER", status=409)


def invalid_dataset(message: str, field: str) -> ControllerError:
    """A wish that cannot be."""
    return ControllerError(message, code="DATASET_INVALID", status=400, details={"field": field})


def _dataset(row: sqlite3.Row) -> Dataset:
    return Dataset(**{key: row[key] for key in row.keys() if key != "seq"})  # noqa: SIM118


def _upload(row: sqlite3.Row) -> Upload:
    return Upload(**{key: row[key] for key in row.keys()})  # noqa: SIM118


MAX_DATASET_MB = 5000
CHECK_WAIT_S = 20.0
"""How long `complete` waits for the look at a file: a client waits 30 s. What takes longer goes on as `processing`."""

__all__ = ["Dataset", "Datasets", "Upload"]


class Datasets:
    """All of them. Files are looked at in threads, one after the other; a look that `close` or a kill broke off is begun again."""

    def __init__(
        self, database: ControllerDatabase, folder: Path, *, largest_mb: int = MAX_DATASET_MB, patience_s: float = CHECK_WAIT_S
    ) -> None:
        self._rows, self._files = DatasetTables(database), DatasetFiles(folder)
        self._largest, self._patience_s = largest_mb * 1_000_000, patience_s
        self._one_look, self._settling = threading.Lock(), threading.Lock()
        self._checks: dict[str, Future[None]] = {}
        self._closing = False
        self.logs = self._rows.logs
        self._recover()

    def close(self) -> None:
        """Change nothing any more; a look that goes on comes to nothing."""
        with self._settling:
            self._closing = True

    def get(self, ref: str) -> Dataset:
        """By id or name; ControllerError 404 where there is none."""
        found = self._rows.find(ref)
        if found is None:
            text = f"there is no dataset {ref[:200]!r}; see: penstock dataset list"
            raise ControllerError(text, code="DATASET_NOT_FOUND", status=404)
        return self._placed(found)

    def page(self, *, limit: int, offset: int) -> tuple[list[Dataset], int]:
        """Newest first, and how many there are in all."""
        found, total = self._rows.page(limit=limit, offset=offset)
        return [self._placed(each) for each in found], total

    def upload(self, ref: str) -> Upload | None:
        """What is on its way to a dataset."""
        return next(iter(self._rows.uploads(self.get(ref).id)), None)

    def begin(self, name: str, size: int, extension: str, overwrite_id: str | None = None, *, creator: str = "") -> Dataset:
        """Expect a file for a name without content, or for the one that `overwrite_id` is, whose content stays until `complete`.

        ControllerError 409 for a name in use, with `existing_dataset_id`.
        """
        check_new_dataset(name, size, extension, largest=self._largest)
        before = self._rows.find(name)
        forgotten = self._rows.uploads(before.id) if before else []
        upload = self._rows.begin(name, size, extension, overwrite_id=overwrite_id, creator=creator)
        for each in forgotten:
            self._files.discard(each.key)
        return self._as_uploaded(upload)

    async def receive(self, dataset_id: str, stream: AsyncIterable[bytes], *, key: str | None = None) -> None:
        """Take a file as it comes; one of another size than was told is refused. It may be sent again until `complete`.

        `key` is of the upload that the caller was let in for.
        """
        upload = self._expected(dataset_id, key)
        self._rows.move(upload, "uploading")
        try:
            digest = await self._files.receive(upload, stream)
        except BaseException as error:
            if not self._is_current(upload) and isinstance(error, ControllerError):
                raise upload_over(dataset_id) from error
            if self._is_current(upload):
                self._rows.move(upload, upload.state)
            raise
        await asyncio.to_thread(self._received, upload, digest)

    async def complete(self, dataset_id: str, extension: str | None = None) -> Dataset:
        """Look at every row, then put the file in its place. Repeating it is harmless, and tells of a flaw again (DatasetError)."""
        upload = self.upload(dataset_id)
        known = self.get(dataset_id)  # after it: a look that ended meanwhile has changed both
        if upload is None:
            return _complete_dataset(known)
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
            look = asyncio.wrap_future(self._begin_check(upload))
        except ControllerError:
            if self.upload(dataset_id) == upload:
                raise
            return await self.complete(dataset_id, extension)  # another call's look ended just now
        done, _ = await asyncio.wait({look}, timeout=self._patience_s)
        if not done:
            look.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return self._as_uploaded(replace(upload, state="processing"))
        look.result()
        return self.get(known.id)

    def abort(self, dataset_id: str) -> Dataset:
        """Give up what is on its way; content that was there stays. Repeating it is harmless."""
        known = self.get(dataset_id)
        for upload in self._rows.uploads(known.id):
            self._rows.cancel(upload, "the upload was cancelled")
            self._files.discard(upload.key)
        return self.get(known.id)

    def add_file(self, path: Path, name: str, *, overwrite: bool = False, creator: str = "") -> Dataset:
        """Keep a copy of a file of this machine, looked at as an upload is; one that is known under the name is left.

        It waits for the disk and for the look: call it in a thread.
        """
        extension, known = path.suffix.lower().lstrip("."), self._rows.find(name)
        if not path.is_file():
            raise DatasetError(f"{path}: no such file; check the path")
        if known is not None and known.digest is not None and (known.digest, known.extension) == (file_sha256(path), extension):
            return self._placed(known)
        replaced = known.id if overwrite and known is not None else None
        begun = self.begin(name, path.stat().st_size, extension, replaced, creator=creator)
        upload = self._expected(begun.id, None)
        self._received(upload, self._files.copy(upload, path))
        self._begin_check(self._expected(begun.id, upload.key)).result()
        return self.get(begun.id)

    def _recover(self) -> None:
        """Go on where a killed controller stopped: give up old uploads, sweep files of none, and look on where a look was begun."""
        for upload in self._rows.uploads():
            if is_abandoned(upload):
                self._rows.cancel(upload, "the upload was never completed")
            elif upload.digest is not None and upload.error is None and self._files.find(upload, upload.digest) is None:
                self._rows.lost(upload)
            elif upload.state == "uploading":
                self._rows.move(upload, "pending" if upload.digest is None else "received")
        waiting = [(each, each.digest) for each in self._rows.uploads() if each.digest is not None and each.error is None]
        self._files.sweep({self._files.draft(upload, digest) for upload, digest in waiting})
        for upload, _ in waiting:
            if upload.state == "processing":
                self._begin_check(upload)

    def _expected(self, dataset_id: str, key: str | None) -> Upload:
        upload = self.upload(dataset_id)
        if upload is None or upload.state in ("processing", "failed") or (key is not None and key != upload.key):
            raise upload_over(dataset_id)
        return upload

    def _received(self, upload: Upload, digest: str) -> None:
        try:
            self._rows.received(upload, digest)
        except ControllerError:
            if not self._is_current(upload):
                self._files.discard(upload.key)
            raise

    def _begin_check(self, upload: Upload) -> "Future[None]":
        """The look at an upload's file, which is made once however often it is asked for."""
        running = self._checks.get(upload.key)
        if running is None:
            moved, running = self._rows.move(upload, "processing"), Future[None]()
            self._checks[upload.key] = running
            threading.Thread(target=self._look, args=(moved, running), name="dataset-look", daemon=True).start()
        return running

    def _look(self, upload: Upload, told: "Future[None]") -> None:
        try:
            with self._one_look:
                self._check(upload)
        except Exception as error:
            told.set_exception(error)
        else:
            told.set_result(None)
        finally:
            self._checks.pop(upload.key, None)

    def _check(self, upload: Upload) -> None:
        """From a file that waits to the content of its name, or to what is wrong with it."""
        with self._settling:
            self._refuse_end()
            name, file = self.get(upload.dataset).name, self._files.find(upload, str(upload.digest))
            if file is None:
                self._rows.lost(upload)
                raise ControllerError(f"dataset {name!r}: its file is gone; upload it again", code="UPLOAD_MISSING", status=409)
        flaw, rows = None, 0
        try:
            rows = check_dataset(file, f"{name}.{upload.extension}")
        except DatasetError as error:
            flaw = error
        with self._settling:
            self._refuse_end()
            if flaw is None:
                self._files.keep(upload, str(upload.digest))
                self._rows.settle(upload, rows)
                return
            self._rows.fail(upload, flaw)
            self._files.discard(upload.key)
            raise flaw

    def _refuse_end(self) -> None:
        if self._closing:
            text = "the controller stopped while it looked at the file; complete the upload again"
            raise ControllerError(text, code="CONTROLLER_STOPPING", status=503)

    def _is_current(self, upload: Upload) -> bool:
        return any(each.key == upload.key for each in self._rows.uploads(upload.dataset))

    def _as_uploaded(self, upload: Upload) -> Dataset:
        """The dataset as it will be, if all goes well."""
        return replace(self.get(upload.dataset), status=upload.state, size=upload.size, extension=upload.extension)

    def _placed(self, dataset: Dataset) -> Dataset:
        return dataset if dataset.digest is None else replace(dataset, path=self._files.content(dataset.digest, dataset.extension))


def _complete_dataset(dataset: Dataset) -> Dataset:
    """A dataset that expects nothing: it has its content, or there is no use in completing it."""
    if dataset.digest is None:
        text = f"dataset {dataset.name!r}: {dataset.message or 'nothing was uploaded'}; begin the upload again"
        raise ControllerError(text, code="UPLOAD_OVER", status=409)
    return dataset
