"""Reads tasks from a dataset file (JSONL, CSV or parquet); every error names the file and the line."""

import csv
import difflib
import hashlib
import importlib
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeVar, cast

from penstock.codec import to_json
from penstock.errors import DatasetError, Issue
from penstock.records import Message, Task

T = TypeVar("T")

COLUMNS = ("system_prompt", "user_prompt", "prompt", "ground_truth", "label", "metadata")
ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_LISTED_ROWS = 20
"""Bad rows in an error message; more are only counted."""
_MAX_DEPTH = 64
"""Levels of nesting in metadata and messages; the JSON writer allows only a few more."""
_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class DatasetRow(NamedTuple):
    """One row, before it becomes a Task."""

    where: str
    """File and line, for error messages."""
    columns: dict[str, Any]


RowOrError = DatasetRow | DatasetError
"""A row, or its error: the next row can be read all the same."""


# Tasks


def load_tasks(path: Path, *, limit: int | None = None, columns: bool = False) -> list[Task]:
    """Returns the tasks of a dataset file in its order; with `limit`, only that many rows are read.

    The prompt is `prompt` (text, or a list of messages), or `user_prompt` with an optional `system_prompt`. `ground_truth` or
    `label` is for the grader alone; `metadata` is an object (or one as JSON text). Other columns are ignored.

    With `columns`, as flows need it, the metadata holds every column but the prompt, and the fields of the column `metadata` too;
    the prompt may be missing, and the label may be in `reward_model.ground_truth`.
    """
    return list(_convert_rows(path, _task_maker(columns), limit=limit))


def check_tasks(path: Path, *, columns: bool | None = False) -> int:
    """Reads the whole file and returns how many tasks it has; DatasetError lists its bad rows.

    With `columns` None, when it is not known which columns the agent needs, only unreadable rows are bad.
    """
    convert: Callable[[DatasetRow], object] = (lambda row: row) if columns is None else _task_maker(columns)
    return sum(1 for _ in _convert_rows(path, convert))


def count_rows(path: Path) -> int:
    """Returns how many rows there are, good or bad."""
    with closing(each_row(path)) as rows:
        return sum(1 for _ in rows)


def _convert_rows(path: Path, convert: Callable[[DatasetRow], T], *, limit: int | None = None) -> Generator[T, None, None]:
    """Yields the converted rows. After the last one, raises DatasetError if any row was bad or there was none."""
    issues: list[Issue] = []
    bad, empty = 0, True
    with closing(each_row(path)) as rows:
        for row in islice(rows, limit):
            empty = False
            error = row if isinstance(row, DatasetError) else None
            try:
                if isinstance(row, DatasetRow):
                    yield convert(row)
            except DatasetError as cause:
                error = cause
            if error is not None:
                bad += 1
                if bad <= MAX_LISTED_ROWS:
                    issues.append(Issue(str(error).removeprefix(f"{path}, ").partition(":")[0], str(error)))
    if bad:
        raise _bad_rows(path, issues, bad)
    if empty:
        raise DatasetError(f"{path}: has no rows; add at least one task")


def _task_maker(columns: bool) -> Callable[[DatasetRow], Task]:
    seen: Counter[str] = Counter()
    return lambda row: _task(row, seen, columns)


def _bad_rows(path: Path, issues: list[Issue], bad: int) -> DatasetError:
    if bad == 1:
        return DatasetError(issues[0].message, issues)
    first = f", the first {MAX_LISTED_ROWS} of them" if bad > MAX_LISTED_ROWS else ""
    return DatasetError("\n  ".join([f"{path}: {bad} rows cannot be tasks{first}", *(issue.message for issue in issues)]), issues)


def _task(row: DatasetRow, seen: Counter[str], columns: bool) -> Task:
    if not (columns and _has_prompt(row)) and (miss := _near_miss(tuple(row.columns))):
        raise DatasetError(f"{row.where}: unknown column {miss[0]!r}; did you mean {miss[1]!r}?")
    prompt = () if columns and not _has_prompt(row) else _prompt(row)
    label, metadata = _label(row), _metadata(row)
    if columns:
        label, metadata = _rule_label(row, label), _all_columns(row, metadata)
    for name, value in (("prompt", prompt), ("label", label), ("metadata", metadata)):
        if flaw := _flaw(value):
            raise DatasetError(f"{row.where}: {name} holds {flaw}")
    digest = hashlib.sha256(to_json((prompt, label, metadata))).hexdigest()[:16]
    seen[digest] += 1
    name = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return Task(id=name, prompt=prompt, label=label, metadata=metadata)


def _has_prompt(row: DatasetRow) -> bool:
    return any(row.columns.get(name) is not None for name in ("prompt", "user_prompt", "system_prompt"))


def _all_columns(row: DatasetRow, metadata: dict[str, Any] | None) -> dict[str, Any]:
    columns = {name: value for name, value in row.columns.items() if name != "prompt"}
    return {**(metadata or {}), **columns, **({"metadata": metadata} if metadata is not None else {})}


def _rule_label(row: DatasetRow, label: str | None) -> str | None:
    """Returns `reward_model.ground_truth` as text, else `label`; DatasetError if they differ."""
    model = row.columns.get("reward_model")
    truth: Any = cast("dict[str, Any]", model).get("ground_truth") if isinstance(model, dict) else None
    if truth is None:
        return label
    text = truth if isinstance(truth, str) else json.dumps(truth, default=str)
    if label is not None and label != text:
        raise DatasetError(f"{row.where}: the label and reward_model.ground_truth differ; keep one of them")
    return text


@lru_cache(maxsize=64)
def _near_miss(names: tuple[str, ...]) -> tuple[str, str] | None:
    """Returns a column that looks like a misspelt known one, with that: its labels or prompts would be lost silently."""
    absent = [name for name in COLUMNS if name not in names]
    for name in names:
        near = [] if name in COLUMNS else difflib.get_close_matches(name.strip().lower(), absent, n=1, cutoff=0.85)
        if near:
            return name, near[0]
    return None


def _prompt(row: DatasetRow) -> tuple[Message, ...]:
    prompt, user, system = (row.columns.get(name) for name in ("prompt", "user_prompt", "system_prompt"))
    if prompt is not None and (user is not None or system is not None):
        raise DatasetError(f"{row.where}: has both 'prompt' and 'user_prompt' or 'system_prompt'; keep one way of asking")
    if isinstance(prompt, list):
        return _messages(cast("list[Any]", prompt), row.where)
    name, text = ("prompt", prompt) if prompt is not None else ("user_prompt", user)
    if text is None or (isinstance(text, str) and not text.strip()):
        raise DatasetError(f"{row.where}: no prompt; fill 'user_prompt' or 'prompt'")
    user_message: Message = {"role": "user", "content": _text(row, name, text)}
    if system is None or system == "":
        return (user_message,)
    return ({"role": "system", "content": _text(row, "system_prompt", system)}, user_message)


def _messages(prompt: list[Any], where: str) -> tuple[Message, ...]:
    if not prompt:
        raise DatasetError(f"{where}: no prompt; 'prompt' is an empty list of messages")
    messages: list[Message] = []
    for index, message in enumerate(prompt):
        name = f"{where}: prompt[{index}]"
        if not isinstance(message, dict):
            raise DatasetError(f"{name} is {type(message).__name__}; write a message such as {{'role': 'user', 'content': '…'}}")
        fields = cast("dict[str, Any]", message)
        if fields.get("role") not in ROLES:
            raise DatasetError(f"{name} has role {fields.get('role')!r}; use one of {', '.join(ROLES)}")
        if not isinstance(fields.get("content"), str | list | None):
            raise DatasetError(f"{name} has {type(fields['content']).__name__} content; write text or a list of parts")
        messages.append({key: value for key, value in fields.items() if value is not None or key == "content"})
    return tuple(messages)


def _label(row: DatasetRow) -> str | None:
    truth, label = row.columns.get("ground_truth"), row.columns.get("label")
    if truth is not None and label is not None:
        raise DatasetError(f"{row.where}: has both 'ground_truth' and 'label'; keep one")
    name, value = ("label", label) if truth is None else ("ground_truth", truth)
    return None if value is None else _text(row, name, value)


def _metadata(row: DatasetRow) -> dict[str, Any] | None:
    value = row.columns.get("metadata")
    if isinstance(value, str):
        value = parse_json(value, f"{row.where}: metadata") if value.strip() else None
    if value is None or isinstance(value, dict):
        return cast("dict[str, Any] | None", value)
    raise DatasetError(f"{row.where}: metadata is {type(value).__name__}; write an object, or one as JSON text")


def _text(row: DatasetRow, name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise DatasetError(f"{row.where}: {name} is {reprlib.repr(value)} ({type(value).__name__}); write it as text, in quotes")


def _flaw(value: object, depth: int = 0) -> str | None:
    """Returns why `value` cannot be stored as JSON and read back unchanged, or None."""
    if depth > _MAX_DEPTH:
        return f"values nested deeper than {_MAX_DEPTH} levels; flatten them"
    if isinstance(value, dict):
        items = cast("dict[str, object]", value)
        return next((flaw for item in [*items, *items.values()] if (flaw := _flaw(item, depth + 1))), None)
    if isinstance(value, list | tuple):
        return next((flaw for item in cast("list[object]", value) if (flaw := _flaw(item, depth + 1))), None)
    return _scalar_flaw(value)


def _scalar_flaw(value: object) -> str | None:
    if isinstance(value, str):
        lone = any("\ud800" <= letter <= "\udfff" for letter in value) if not value.isascii() else False
        return "a lone surrogate, which is half of a character; remove or complete it" if lone else None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer beyond 64 bits; write it as text"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}; write a finite number or null"
    if value is None or isinstance(value, int | float):
        return None
    return f"a value of type {type(value).__name__}; write it as text or a number"


# Rows of a file


def read_rows(path: Path) -> Generator[DatasetRow, None, None]:
    """Yields the rows of a file; DatasetError at the first bad one."""
    for row in each_row(path):
        if isinstance(row, DatasetError):
            raise row
        yield row


def each_row(path: Path) -> Generator[RowOrError, None, None]:
    """Yields the rows of a file, and an error for each bad one. Raises DatasetError if the rest of the file cannot be read."""
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DatasetError(f"{path}: a dataset is a .jsonl, .csv or .parquet file; rename or convert it")
    try:
        yield from reader(path)
    except FileNotFoundError as cause:
        raise DatasetError(f"{path}: no such file; check the path under [dataset]") from cause
    except OSError as cause:
        reason = cause.strerror or str(cause).partition("\n")[0]
        raise DatasetError(f"{path}: cannot be read: {reason}; check the file") from cause


def parse_json(text: str, where: str) -> Any:
    """Parses JSON strictly: no duplicate keys, no NaN or infinity."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        if len(set(keys)) < len(keys):
            duplicate = next(key for key in keys if keys.count(key) > 1)
            raise DatasetError(f"{where}: key {duplicate!r} is given twice; keep one of them")
        return dict(items)

    def constant(name: str) -> NoReturn:
        raise DatasetError(f"{where}: {name} is not JSON; write a finite number or null")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as cause:
        raise DatasetError(f"{where}: not valid JSON: {cause.msg} (column {cause.colno}); fix the line") from cause
    except (RecursionError, ValueError) as cause:
        raise DatasetError(f"{where}: JSON that cannot be read: {cause}; make it simpler") from cause


def _read_jsonl(path: Path) -> Iterator[RowOrError]:
    with path.open("rb") as file:
        _check_byte_order_mark(path, file)
        for number, line in enumerate(file, 1):
            try:
                yield _json_row(_decode(path, number, line), f"{path}, line {number}")
            except DatasetError as error:
                yield error


def _json_row(text: str, where: str) -> DatasetRow:
    if not text.strip():
        raise DatasetError(f"{where}: blank line; remove it")
    columns = parse_json(text, where)
    if not isinstance(columns, dict):
        raise DatasetError(f"{where}: {type(columns).__name__} instead of an object; write one JSON object per line")
    return DatasetRow(where, columns)  # pyright: ignore[reportUnknownArgumentType]


def _read_csv(path: Path) -> Iterator[RowOrError]:
    with path.open("rb") as file:
        _check_byte_order_mark(path, file)
        reader = csv.reader((_decode(path, number, line) for number, line in enumerate(file, 1)), strict=True)
        header = next((_check_header(names, f"{path}, line 1") for _, names in _csv_records(path, reader)), list[str]())
        for number, cells in _csv_records(path, reader):
            where = f"{path}, line {number}"
            if not cells:
                yield DatasetError(f"{where}: blank line; remove it")
            elif len(cells) != len(header):
                text = f"{len(cells)} cells under {len(header)} columns; quote cells that hold commas or quotes"
                yield DatasetError(f"{where}: {text}")
            else:
                yield DatasetRow(where, {name: cell or None for name, cell in zip(header, cells, strict=True)})


def _csv_records(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields records with the line that each begins on: a quoted cell may span several."""
    while True:
        number = reader.line_num + 1
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as cause:
            raise DatasetError(f"{path}, line {number}: not valid CSV: {cause}; fix the quotes, or write JSONL instead") from cause


def _check_header(names: list[str], where: str) -> list[str]:
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise DatasetError(f"{where}: column {duplicates[0]!r} is given twice; rename one of them")
    return names


def _read_parquet(path: Path) -> Iterator[DatasetRow]:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as cause:
        raise DatasetError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from cause
    try:
        with parquet.ParquetFile(path) as file:
            _check_header(list(file.schema_arrow.names), str(path))
            yield from _parquet_rows(path, file.iter_batches(batch_size=1024))
    except arrow.ArrowException as cause:
        reason = str(cause).partition("\n")[0]
        raise DatasetError(f"{path}: not a parquet file that can be read: {reason}; write it again") from cause


def _parquet_rows(path: Path, batches: Iterable[Any]) -> Iterator[DatasetRow]:
    number = 0
    for batch in batches:
        for columns in batch.to_pylist():
            number += 1
            yield DatasetRow(f"{path}, row {number}", columns)


def _check_byte_order_mark(path: Path, file: BinaryIO) -> None:
    if file.read(3).startswith(_BOMS):
        raise DatasetError(f"{path}, line 1: begins with a byte order mark; save the file as UTF-8 without one")
    file.seek(0)


def _decode(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as cause:
        raise DatasetError(f"{path}, line {number}: not UTF-8 ({cause.reason}); save the file as UTF-8") from cause
