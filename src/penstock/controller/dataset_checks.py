"""A whole dataset file looked at: how many rows it has, or everything that is wrong with them; and its first rows."""

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import DatasetError, Issue
from penstock.sdk.dataset import check_tasks
from penstock.sdk.rows import read_rows

PREVIEW_ROWS, PREVIEW_CHARACTERS = 50, 4000
"""Of a preview: rows, and characters of a value."""


def check_dataset(path: Path, name: str) -> int:
    """How many rows `path` has; DatasetError with an issue for each bad one, which calls the file `name`.

    A row must do for some agent: one with a prompt, or any row for a flow that asks by itself. What an agent needs beyond that is
    looked at when a run is submitted.
    """
    try:
        return check_tasks(path, columns=True)
    except DatasetError as error:
        issues = [_named(issue, path, name) for issue in error.issues]
        first = str(error).partition("\n")[0].replace(str(path), name)
        raise DatasetError(first, issues or [Issue(name, first.removeprefix(f"{name}: "))]) from None


def preview(path: Path) -> list[dict[str, Any]]:
    """The first rows as JSON can hold them, long values cut."""
    with closing(read_rows(path)) as rows:
        return [{name: _short(value) for name, value in row.columns.items()} for row in islice(rows, PREVIEW_ROWS)]


def _named(issue: Issue, path: Path, name: str) -> Issue:
    """The place is the issue's key already, and the path is the controller's own: neither belongs in the message."""
    message = issue.message.removeprefix(f"{path}, {issue.key}: ").replace(str(path), name)
    return Issue(issue.key.replace(str(path), name), message)


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    if len(text) > PREVIEW_CHARACTERS:
        return f"{text[:PREVIEW_CHARACTERS]}…"
    return value if isinstance(value, str) else orjson.loads(text)
