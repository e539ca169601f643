"""Dataset files to numbered rows: JSONL, CSV and parquet, each flaw named with its file and line."""

import csv
import importlib
import json
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from penstock.errors import DatasetError

_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class Row(NamedTuple):
    """One row and where it stands, for error messages."""

    where: str
    columns: dict[str, Any]


Found = Row | DatasetError
"""A row, or what is wrong with it: the next one can be read all the same."""


def read_rows(path: Path) -> Generator[Row, None, None]:
    """The rows of `path`, read as they are asked for; DatasetError at the first that is none."""
    for found in each_row(path):
        if isinstance(found, DatasetError):
            raise found
        yield found


def each_row(path: Path) -> Generator[Found, None, None]:
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


def _read_jsonl(path: Path) -> Iterator[Found]:
    with path.open("rb") as file:
        _check_mark(path, file)
        for number, line in enumerate(file, 1):
            try:
                yield _object(_decoded(path, number, line), f"{path}, line {number}")
            except DatasetError as flaw:
                yield flaw


def _object(text: str, where: str) -> Row:
    if not text.strip():
        raise DatasetError(f"{where}: blank line; remove it")
    columns = parse_json(text, where)
    if not isinstance(columns, dict):
        raise DatasetError(f"{where}: {type(columns).__name__} instead of an object; write one JSON object per line")
    return Row(where, columns)  # pyright: ignore[reportUnknownArgumentType]


def _read_csv(path: Path) -> Iterator[Found]:
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
                yield Row(where, {name: cell or None for name, cell in zip(header, cells, strict=True)})


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


def _read_parquet(path: Path) -> Iterator[Row]:
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


def _parquet_rows(path: Path, batches: Iterable[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for columns in batch.to_pylist():
            number += 1
            yield Row(f"{path}, row {number}", columns)


def _check_mark(path: Path, file: BinaryIO) -> None:
    if file.read(3).startswith(_BOMS):
        raise DatasetError(f"{path}, line 1: begins with a byte order mark; save the file as UTF-8 without one")
    file.seek(0)


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as cause:
        raise DatasetError(f"{path}, line {number}: not UTF-8 ({cause.reason}); save the file as UTF-8") from cause
