"""Dataset files to numbered rows: JSONL, CSV and parquet, each flaw named with its file and line."""

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

_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class DatasetRow(NamedTuple):
    """One row and where it stands, for error messages."""

    where: str
    columns: dict[str, Any]


RowOrError = DatasetRow | DatasetError
"""A row, or what is wrong with it: the next one can be read all the same."""


def read_rows(path: Path) -> Generator[DatasetRow, None, None]:
    """The rows of `path`, read as they are asked for; DatasetError at the first that is none."""
    for found in each_row(path):
        if isinstance(found, DatasetError):
            raise found
        yield found


def each_row(path: Path) -> Generator[RowOrError, None, None]:
    """The same with bad rows among the others; the file's ending says how it is read. DatasetError where nothing more can be."""
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
    """JSON that means one thing only: no duplicate keys, no NaN or infinity."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise DatasetError(f"{where}: key {twice!r} is given twice; keep one of them")
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
        _check_mark(path, file)
        for number, line in enumerate(file, 1):
            try:
                yield _object(_decoded(path, number, line), f"{path}, line {number}")
            except DatasetError as flaw:
                yield flaw


def _object(text: str, where: str) -> DatasetRow:
    if not text.strip():
        raise DatasetError(f"{where}: blank line; remove it")
    columns = parse_json(text, where)
    if not isinstance(columns, dict):
        raise DatasetError(f"{where}: {type(columns).__name__} instead of an object; write one JSON object per line")
    return DatasetRow(where, columns)  # pyright: ignore[reportUnknownArgumentType]


def _read_csv(path: Path) -> Iterator[RowOrError]:
    with path.open("rb") as file:
        _check_mark(path, file)
        reader = csv.reader((_decoded(path, number, line) for number, line in enumerate(file, 1)), strict=True)
        header = next((_header(names, f"{path}, line 1") for _, names in _records(path, reader)), list[str]())
        for number, cells in _records(path, reader):
            where = f"{path}, line {number}"
            if not cells:
                yield DatasetError(f"{where}: blank line; remove it")
            elif len(cells) != len(header):
                text = f"{len(cells)} cells under {len(header)} columns; quote cells that hold commas or quotes"
                yield DatasetError(f"{where}: {text}")
            else:
                yield DatasetRow(where, {name: cell or None for name, cell in zip(header, cells, strict=True)})


def _records(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Records with the line each begins on: a quoted cell may run over several."""
    while True:
        number = reader.line_num + 1
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as cause:
            raise DatasetError(f"{path}, line {number}: not valid CSV: {cause}; fix the quotes, or write JSONL instead") from cause


def _header(names: list[str], where: str) -> list[str]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DatasetError(f"{where}: column {twice[0]!r} is given twice; rename one of them")
    return names


def _read_parquet(path: Path) -> Iterator[DatasetRow]:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as cause:
        raise DatasetError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from cause
    try:
        with parquet.ParquetFile(path) as file:
            _header(list(file.schema_arrow.names), str(path))
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


def _check_mark(path: Path, file: BinaryIO) -> None:
    if file.read(3).startswith(_BOMS):
        raise DatasetError(f"{path}, line 1: begins with a byte order mark; save the file as UTF-8 without one")
    file.seek(0)


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as cause:
        raise DatasetError(f"{path}, line {number}: not UTF-8 ({cause.reason}); save the file as UTF-8") from cause


T = TypeVar("T")

COLUMNS = ("system_prompt", "user_prompt", "prompt", "ground_truth", "label", "metadata")
ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_LISTED_ROWS = 20
"""Bad rows of a file that are named; more are only counted."""
_DEEPEST = 64
"""Levels of nesting in metadata and messages; the JSON writer stops a little above that."""


def load_tasks(path: Path, *, limit: int | None = None, columns: bool = False) -> list[Task]:
    """The tasks of a dataset file, in its order; with `limit`, only that many rows are read.

    A row asks with `prompt` (text, or a list of messages) or with `user_prompt` and, if it likes, `system_prompt`. `ground_truth`
    or `label` is for the grader alone; `metadata` is an object (or one as JSON text). Other columns are left alone.

    With `columns`, as flows want it, the metadata holds every column but the prompt, and what the column `metadata` holds besides;
    the prompt may be missing, and the label may stand at `reward_model.ground_truth`.
    """
    return list(_made(path, _task_maker(columns), limit=limit))


def check_tasks(path: Path, *, columns: bool | None = False) -> int:
    """How many tasks there are, the whole file being read and nothing of it kept; DatasetError lists its bad rows.

    With `columns` None, where it is not known what an agent takes, only rows that nobody could read are bad.
    """
    make: Callable[[DatasetRow], object] = (lambda row: row) if columns is None else _task_maker(columns)
    return sum(1 for _ in _made(path, make))


def count_rows(path: Path) -> int:
    """How many rows there are, good or bad."""
    with closing(each_row(path)) as rows:
        return sum(1 for _ in rows)


def _made(path: Path, make: Callable[[DatasetRow], T], *, limit: int | None = None) -> Generator[T, None, None]:
    """What `make` makes of each row, as they are read; after the last one, DatasetError where any row is bad or there is none."""
    flaws: list[Issue] = []
    bad, empty = 0, True
    with closing(each_row(path)) as rows:
        for row in islice(rows, limit):
            empty = False
            flaw = row if isinstance(row, DatasetError) else None
            try:
                if isinstance(row, DatasetRow):
                    yield make(row)
            except DatasetError as error:
                flaw = error
            if flaw is not None:
                bad += 1
                flaws += [Issue(str(flaw).removeprefix(f"{path}, ").partition(":")[0], str(flaw))] if bad <= MAX_LISTED_ROWS else []
    if bad:
        raise _bad_rows(path, flaws, bad)
    if empty:
        raise DatasetError(f"{path}: has no rows; add at least one task")


def _task_maker(columns: bool) -> Callable[[DatasetRow], Task]:
    seen: Counter[str] = Counter()
    return lambda row: _task(row, seen, columns)


def _bad_rows(path: Path, flaws: list[Issue], bad: int) -> DatasetError:
    if bad == 1:
        return DatasetError(flaws[0].message, flaws)
    first = f", the first {MAX_LISTED_ROWS} of them" if bad > MAX_LISTED_ROWS else ""
    return DatasetError("\n  ".join([f"{path}: {bad} rows cannot be tasks{first}", *(flaw.message for flaw in flaws)]), flaws)


def _task(row: DatasetRow, seen: Counter[str], columns: bool) -> Task:
    if not (columns and _asks(row)) and (miss := _near_miss(tuple(row.columns))):
        raise DatasetError(f"{row.where}: unknown column {miss[0]!r}; did you mean {miss[1]!r}?")
    prompt = () if columns and not _asks(row) else _prompt(row)
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


def _asks(row: DatasetRow) -> bool:
    """Whether a row has a prompt at all, good or bad."""
    return any(row.columns.get(name) is not None for name in ("prompt", "user_prompt", "system_prompt"))


def _all_columns(row: DatasetRow, metadata: dict[str, Any] | None) -> dict[str, Any]:
    told = {name: value for name, value in row.columns.items() if name != "prompt"}
    return {**(metadata or {}), **told, **({"metadata": metadata} if metadata is not None else {})}


def _rule_label(row: DatasetRow, label: str | None) -> str | None:
    """What the row's `reward_model` says is right, as text; a label of the row's own must not say otherwise."""
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
    """A column that looks like a known one which the row lacks: its labels or prompts would be lost without a word."""
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
    asked: Message = {"role": "user", "content": _text(row, name, text)}
    if system is None or system == "":
        return (asked,)
    return ({"role": "system", "content": _text(row, "system_prompt", system)}, asked)


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
    """What keeps `value` from being stored as JSON and read back the same; None where nothing does."""
    if depth > _DEEPEST:
        return f"values nested deeper than {_DEEPEST} levels; flatten them"
    if isinstance(value, dict):
        items = cast("dict[str, object]", value)
        return next((flaw for item in [*items, *items.values()] if (flaw := _flaw(item, depth + 1))), None)
    if isinstance(value, list | tuple):
        return next((flaw for item in cast("list[object]", value) if (flaw := _flaw(item, depth + 1))), None)
    return _leaf_flaw(value)


def _leaf_flaw(value: object) -> str | None:
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
