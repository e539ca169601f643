"""The platform's rules for datasets, checked in every row. They are stricter than what a task needs."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from penstock.errors import DatasetError
from penstock.sdk.dataset import DatasetRow, each_row, parse_json

LARGEST = 5 * 1024**3
FEWEST_ROWS = 4
LISTED = 20
"""The number of errors that are listed; the rest are counted."""
REQUIRED = ("system_prompt", "user_prompt")
TEXTS = (*REQUIRED, "ground_truth")


@dataclass(slots=True)
class DatasetIssues:
    rows: int = 0
    errors: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Shapes:
    """The shape of the metadata in the rows read so far."""

    types: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Maps a key's path to its JSON type and the row where it first occurs."""
    filled: bool = False
    present: bool = False


def check_file(path: Path) -> DatasetIssues:
    """Checks the whole file, one row at a time."""
    found, more = DatasetIssues(), 0
    for error in _flaws(path, found):
        if len(found.errors) < LISTED:
            found.errors.append(error)
        else:
            more += 1
    if more:
        found.errors.append(f"and {more} more")
    return found


def _flaws(path: Path, found: DatasetIssues) -> Iterator[str]:
    if path.is_file() and (size := path.stat().st_size) > LARGEST:
        yield f"{path}: {size} bytes; a dataset has at most 5 GB"
        return
    shapes = Shapes()
    try:
        with closing(each_row(path)) as rows:
            for row in rows:
                found.rows += 1
                yield from [str(row)] if isinstance(row, DatasetError) else _row_flaws(row, shapes)
    except DatasetError as flaw:
        yield str(flaw)
        return
    if found.rows < FEWEST_ROWS:
        yield f"{path}: {found.rows} rows; a dataset has at least {FEWEST_ROWS}"
    if shapes.present and not shapes.filled:
        yield f"{path}: metadata is an empty object in every row; leave the column out"


def _row_flaws(row: DatasetRow, shapes: Shapes) -> Iterator[str]:
    for name in REQUIRED:
        if name not in row.columns:
            meant = next((f"; there is {one!r}: names are case-sensitive" for one in row.columns if one.lower() == name), "")
            yield f"{row.where}: no column {name!r}{meant}"
    for name in TEXTS:
        value = row.columns.get(name)
        if value is not None and not isinstance(value, str):
            yield f"{row.where}: {name} is {type(value).__name__}; write it as text"
    if "user_prompt" in row.columns and not str(row.columns["user_prompt"] or "").strip():
        yield f"{row.where}: user_prompt is empty"
    yield from _metadata_flaws(row, shapes)


def _metadata_flaws(row: DatasetRow, shapes: Shapes) -> Iterator[str]:
    value = row.columns.get("metadata")
    try:
        if isinstance(value, str):
            value = parse_json(value, f"{row.where}: metadata") if value.strip() else None
    except DatasetError as flaw:
        yield str(flaw)
        return
    if value is None:
        return
    if not isinstance(value, dict):
        yield f"{row.where}: metadata is {type(value).__name__}; write an object, or one as JSON text"
        return
    metadata = cast("dict[str, Any]", value)
    shapes.present, shapes.filled = True, shapes.filled or bool(metadata)
    yield from _shape_flaws(metadata, "metadata", row.where, shapes)


def _shape_flaws(value: Mapping[str, Any], path: str, where: str, shapes: Shapes) -> Iterator[str]:
    for key, inner in value.items():
        here = f"{path}.{key}"
        kind = _kind(inner)
        known, first = shapes.types.setdefault(here, (kind, where)) if kind != "null" else (kind, where)
        if known != kind:
            yield f"{where}: {here} is {kind}, but {known} in {first}; keep one type"
        if isinstance(inner, dict):
            if not inner:
                yield f"{where}: {here} is an empty object; leave it out"
            yield from _shape_flaws(cast("dict[str, Any]", inner), here, where, shapes)
        elif isinstance(inner, int) and not -(2**63) <= inner < 2**63:
            yield f"{where}: {here} is an integer beyond 64 bits; write it as text"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: tuple[tuple[type, str], ...] = ((str, "string"), (int, "number"), (float, "number"), (dict, "object"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "another value")
