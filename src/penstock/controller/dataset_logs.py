"""What was noted while datasets were received: entries a page at a time, from the newest back."""

from typing import Any, Literal, NamedTuple

import orjson

from penstock.controller.database import Database
from penstock.controller.runs import now
from penstock.errors import ControllerError

TABLE = """CREATE TABLE IF NOT EXISTS dataset_logs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, dataset TEXT NOT NULL, timestamp TEXT NOT NULL, level TEXT NOT NULL, step TEXT NOT NULL,
    message TEXT NOT NULL, details TEXT)"""
INDEX = "CREATE INDEX IF NOT EXISTS dataset_logs_of ON dataset_logs (dataset, seq)"

Level = Literal["info", "warning", "error"]
Step = Literal["upload", "validation"]


class LogPage(NamedTuple):
    """Some entries, oldest first."""

    entries: list[dict[str, Any]]
    next_cursor: str | None
    """Leads further the same way; None at the beginning. Forwards it always says from where to ask again."""


class DatasetLogs:
    """The entries of all datasets."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(TABLE, INDEX)

    def add(self, dataset: str, step: Step, message: str, *, level: Level = "info", **details: Any) -> None:
        """Note something."""
        told = orjson.dumps(details).decode() if details else None
        statement = "INSERT INTO dataset_logs (dataset, timestamp, level, step, message, details) VALUES (?, ?, ?, ?, ?, ?)"
        self._database.write(statement, [dataset, now(), level, step, message, told])

    def page(self, dataset: str, *, limit: int, cursor: str | None, newer: bool = False) -> LogPage:
        """The newest entries, or those before (with `newer`: after) `cursor`; `newer` without a cursor begins at the beginning."""
        place = _place(cursor)
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
        return LogPage(told, following)


def _place(cursor: str | None) -> int | None:
    if cursor is None or cursor == "":
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):
        text = f"cursor {cursor[:40]!r} is not one that this controller gave"
        raise ControllerError(text, code="QUERY_INVALID", status=400, details={"field": "cursor"})
    return int(cursor)


def _details(text: str | None) -> dict[str, Any] | None:
    return None if text is None else orjson.loads(text)
