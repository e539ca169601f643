"""Pages of a run's log, backwards from its end or forwards from a cursor. The file may grow meanwhile."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request

from penstock.errors import ControllerError
from penstock_controller.api.bodies import as_object, int_param

MAX_ENTRIES, DEFAULT_ENTRIES = 200, 50
"""Entries per page."""
BLOCK_BYTES = 1 << 16


class LogQuery(NamedTuple):
    limit: int
    newer: bool
    offset: int | None
    """Byte offset at which the page ends, or with `newer` starts; None is the end, or with `newer` the start, of the file."""


def log_query(request: Request, log_id: str) -> LogQuery:
    """Reads the query parameters; ControllerError 400 if they are invalid, or for a cursor of another log than `log_id`."""
    limit = int_param(request, "limit", DEFAULT_ENTRIES, low=1, high=MAX_ENTRIES)
    direction = request.query_params.get("direction", "older")
    if direction not in ("older", "newer"):
        raise _invalid_query("direction", f"direction = {direction[:40]!r}: give older or newer")
    cursor = request.query_params.get("cursor")
    return LogQuery(limit, direction == "newer", _cursor_position(cursor, log_id) if cursor else None)


def log_page(file: Path, log_id: str, query: LogQuery) -> dict[str, Any]:
    """Returns `{logs, next_cursor}`, oldest first. The cursor is null at the beginning of the file, never with `newer`."""
    size = _complete_size(file)
    if query.newer:
        start = min(query.offset or 0, size)
        lines, end = _read_forwards(file, start, size, query.limit)
        return {"logs": [_entry(line) for line in lines], "next_cursor": _cursor(log_id, end)}
    end = size if query.offset is None else min(query.offset, size)
    lines, start = _read_backwards(file, end, query.limit)
    return {"logs": [_entry(line) for line in lines], "next_cursor": _cursor(log_id, start) if start else None}


def log_text(file: Path) -> bytes:
    """Returns the whole log as text: a line per entry, its further lines indented."""
    if not file.exists():
        return b""
    entries = [_entry(line) for line in file.read_bytes()[: _complete_size(file)].splitlines()]
    return "".join(_line(**entry) for entry in entries).encode("utf-8", "replace")


def _line(*, timestamp: str, level: str, step: str, message: str, **_: Any) -> str:
    prefix = f"[step {step}] " if step else ""
    text = f"{timestamp} {level.upper():7} {prefix}{message}"
    return text.replace("\n", "\n    ") + "\n"


def _entry(line: bytes) -> dict[str, Any]:
    """Returns a line as an entry, with strings for all fields even if the line is malformed."""
    try:
        entry = as_object(orjson.loads(line))
    except ValueError:
        entry = {"message": line.decode("utf-8", "replace")}
    texts = {name: "" if entry.get(name) is None else str(entry[name]) for name in ("timestamp", "level", "step", "message")}
    details = entry.get("details")
    return texts | {"details": details if isinstance(details, dict) else None}


def _complete_size(file: Path) -> int:
    """Returns the file's size without a last line that is still being written."""
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
    """Returns the last `limit` lines before `end`, and the offset of the first."""
    if not end:
        return [], 0
    part, start = b"", end
    with file.open("rb") as log:
        while start and part.count(b"\n") <= limit:
            step = min(BLOCK_BYTES, start)
            start -= step
            log.seek(start)
            part = log.read(step) + part
    lines = part.splitlines(keepends=True)[-limit:]
    return lines, end - sum(map(len, lines))


def _cursor(log_id: str, offset: int) -> str:
    return urlsafe_b64encode(f"{log_id}:{offset}".encode()).decode().rstrip("=")


def _cursor_position(cursor: str, log_id: str) -> int:
    try:
        cursor_log, _, offset = urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4)).decode().rpartition(":")
    except ValueError:
        cursor_log = offset = ""
    if cursor_log != log_id or not offset.isdecimal() or len(offset) > 18:
        raise _invalid_query("cursor", "the cursor is not one of this log's; take it from the last page, or leave it out")
    return int(offset)


def _invalid_query(name: str, text: str) -> ControllerError:
    return ControllerError(text, code="QUERY_INVALID", status=400, details={"field": name})
