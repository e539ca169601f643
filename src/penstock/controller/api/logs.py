"""A log a page at a time, backwards from its end or forwards from any place; the file may grow meanwhile."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request

from penstock.controller.api.bodies import as_object, int_param
from penstock.errors import ControllerError

MAX_ENTRIES, DEFAULT_ENTRIES = 200, 50
"""Entries of a page."""
BLOCK_BYTES = 1 << 16


class LogQuery(NamedTuple):
    """Which page is asked for."""

    limit: int
    newer: bool
    place: int | None
    """Byte in the file that the page ends before (begins at, with `newer`); None is the end (the beginning)."""


def log_query(request: Request, log_id: str) -> LogQuery:
    """Of the log of `log_id`, whose cursors are no other's; ControllerError 400."""
    limit = int_param(request, "limit", DEFAULT_ENTRIES, low=1, high=MAX_ENTRIES)
    direction = request.query_params.get("direction", "older")
    if direction not in ("older", "newer"):
        raise _invalid_query("direction", f"direction = {direction[:40]!r}: give older or newer")
    cursor = request.query_params.get("cursor")
    return LogQuery(limit, direction == "newer", _cursor_position(cursor, log_id) if cursor else None)


def log_page(file: Path, log_id: str, asked: LogQuery) -> dict[str, Any]:
    """`{logs, next_cursor}`, oldest first. Backwards the cursor is null at the beginning; forwards it says where to go on."""
    size = _complete_size(file)
    if asked.newer:
        start = min(asked.place or 0, size)
        lines, end = _read_forwards(file, start, size, asked.limit)
        return {"logs": [_entry(line) for line in lines], "next_cursor": _cursor(log_id, end)}
    end = size if asked.place is None else min(asked.place, size)
    lines, start = _read_backwards(file, end, asked.limit)
    return {"logs": [_entry(line) for line in lines], "next_cursor": _cursor(log_id, start) if start else None}


def log_text(file: Path) -> bytes:
    """The whole log for a reader: a line for each entry, further lines of it indented."""
    if not file.exists():
        return b""
    entries = [_entry(line) for line in file.read_bytes()[: _complete_size(file)].splitlines()]
    return "".join(_line(**entry) for entry in entries).encode("utf-8", "replace")


def _line(*, timestamp: str, level: str, step: str, message: str, **_: Any) -> str:
    place = f"[step {step}] " if step else ""
    text = f"{timestamp} {level.upper():7} {place}{message}"
    return text.replace("\n", "\n    ") + "\n"


def _entry(line: bytes) -> dict[str, Any]:
    """Strings for a client, whatever was written."""
    try:
        told = as_object(orjson.loads(line))
    except ValueError:
        told = {"message": line.decode("utf-8", "replace")}
    texts = {name: "" if told.get(name) is None else str(told[name]) for name in ("timestamp", "level", "step", "message")}
    details = told.get("details")
    return texts | {"details": details if isinstance(details, dict) else None}


def _complete_size(file: Path) -> int:
    """Bytes up to the end of the last whole line."""
    try:
        size = file.stat().st_size
    except OSError:
        return 0
    with file.open("rb") as log:
        while size:
            start = max(0, size - BLOCK_BYTES)
            log.seek(start)
            if (found := log.read(size - start).rfind(b"\n")) >= 0:
                return start + found + 1
            size = start
    return 0


def _read_forwards(file: Path, start: int, size: int, limit: int) -> tuple[list[bytes], int]:
    lines: list[bytes] = []
    if start >= size:
        return lines, start
    with file.open("rb") as log:
        log.seek(start)
        while len(lines) < limit and log.tell() < size:
            lines.append(log.readline())
        return lines, log.tell()


def _read_backwards(file: Path, end: int, limit: int) -> tuple[list[bytes], int]:
    """The last `limit` lines before `end`, and where the first of them begins."""
    if not end:
        return [], 0
    part, start = b"", end
    with file.open("rb") as log:
        while start and part.count(b"\n") <= limit:
            step = min(BLOCK_BYTES, start)
            start -= step
            log.seek(start)
            part = log.read(step) + part
    lines = part.splitlines(keepends=True)
    kept = lines[-limit:]
    return kept, end - sum(map(len, kept))


def _cursor(log_id: str, place: int) -> str:
    return urlsafe_b64encode(f"{log_id}:{place}".encode()).decode().rstrip("=")


def _cursor_position(cursor: str, log_id: str) -> int:
    try:
        whose, _, place = urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4)).decode().rpartition(":")
    except ValueError:
        whose = place = ""
    if whose != log_id or not place.isdecimal() or len(place) > 18:
        raise _invalid_query("cursor", "the cursor is not one of this log's; take it from the last page, or leave it out")
    return int(place)


def _invalid_query(name: str, text: str) -> ControllerError:
    return ControllerError(text, code="QUERY_INVALID", status=400, details={"field": name})
