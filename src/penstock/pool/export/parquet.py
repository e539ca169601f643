"""A pool as parquet files, one per kind of record: plain values and token lists as typed columns, everything else as JSON."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import orjson
import pyarrow
import pyarrow.parquet as arrow_parquet

from penstock.codec import current_names, from_json, to_json
from penstock.errors import ConfigError
from penstock.pool.export.histories import GroupHistory, escape, unescape
from penstock.records import Grade, Group, Mark, Node, Rollout, RolloutRef, Step
from penstock.system.files import creating

T = TypeVar("T")

ColumnKind = Literal["text", "int", "float", "bool", "ints", "floats", "json"]
_PLAIN: dict[Any, ColumnKind] = {
    str: "text",
    int: "int",
    float: "float",
    bool: "bool",
    tuple[int, ...]: "ints",
    tuple[float, ...]: "floats",
}


class ParquetColumn(NamedTuple):
    name: str
    kind: ColumnKind


LATER = frozenset({"components", "policy", "kept", "most_likely", "branch", "replayed"})
"""Columns that the exports of an earlier penstock lack; their records take the default."""


@cache
def columns(record: type[Any], without: tuple[str, ...] = ()) -> list[ParquetColumn]:
    """Return the columns of a record type, in the order of its fields."""
    return [ParquetColumn(name, _kind(hint)) for name, hint in get_type_hints(record).items() if name not in without]


def to_row(record: Any, chosen: Sequence[ParquetColumn]) -> dict[str, Any]:
    return {column.name: _cell(getattr(record, column.name), column.kind) for column in chosen}


def from_row(record: type[T], row: dict[str, Any], chosen: Sequence[ParquetColumn], **fields: Any) -> T:
    """Build the record that `to_row` wrote; `fields` are those without a column. ValueError if the row does not fit."""
    row = current_names(record, row)
    chosen = [column for column in chosen if column.name in row or column.name not in LATER]
    lists = {column.name for column in chosen if column.kind in ("ints", "floats") and row[column.name] is not None}
    plain: dict[str, Any] = {name: [] for name in lists}
    for name, kind in chosen:
        if name not in lists:
            value = row[name]
            plain[name] = orjson.Fragment(value) if kind == "json" and value is not None else value
    built = from_json(record, orjson.dumps({**plain, **{name: orjson.Fragment(to_json(value)) for name, value in fields.items()}}))
    return replace(built, **{name: tuple(row[name]) for name in lists}) if lists else built  # type: ignore[type-var]


def _kind(hint: Any) -> ColumnKind:
    given = [part for part in get_args(hint) if part is not NoneType] if NoneType in get_args(hint) else [hint]
    [plain] = given if len(given) == 1 else [object]
    if get_origin(plain) is Literal or (isinstance(plain, type) and issubclass(plain, StrEnum)):
        return "text"
    return _PLAIN.get(plain, "json")


def _cell(value: Any, kind: ColumnKind) -> Any:
    if value is None:
        return None
    if kind == "json":
        return to_json(value).decode()
    return str(value) if kind == "text" else value


arrow: Any = pyarrow  # its stubs leave most types unknown
parquet: Any = arrow_parquet

FORMAT = b"1"
FLUSH_ROWS, FLUSH_TOKENS = 10_000, 2_000_000
"""How much is kept in memory before it is written."""
BATCH_ROWS = 256
"""Rows read at a time."""

_TYPES: dict[str, Any] = {
    "text": arrow.string(),
    "int": arrow.int64(),
    "float": arrow.float64(),
    "bool": arrow.bool_(),
    "ints": arrow.list_(arrow.int32()),
    "floats": arrow.list_(arrow.float32()),
    "json": arrow.string(),
}


class ParquetTable(NamedTuple):
    """One file: its name, the column that names the owner of a row, and its columns."""

    name: str
    owner: str
    columns: list[ParquetColumn]


PARTS: dict[str, type[Any]] = {"nodes": Node, "steps": Step, "grades": Grade, "marks": Mark}
"""Record types of a rollout, by field name."""
_HEAD = columns(Group, ("rollouts", "branches"))
_ENDING = columns(Rollout, ("rollout", *PARTS))
TABLES = [
    ParquetTable("groups", "id", [*_HEAD, ParquetColumn("trained", "int")]),
    ParquetTable("rollouts", "group_id", [*columns(RolloutRef), *_ENDING]),
    *(ParquetTable(name, "rollout_id", columns(kind)) for name, kind in PARTS.items()),
]


class ParquetSink:
    def __init__(self, writers: dict[str, Any]) -> None:
        self._writers = writers
        self._rows: dict[str, list[dict[str, Any]]] = {table.name: [] for table in TABLES}
        self._tokens = 0

    def write(self, history: GroupHistory) -> None:
        self._rows["groups"].append({**to_row(history.group, _HEAD), "trained": history.trained})
        for rollout in history.rollouts:
            ending = to_row(replace(rollout, message=escape(rollout.message)), _ENDING)
            self._rows["rollouts"].append({**to_row(rollout.ref, columns(RolloutRef)), **ending})
            for name, kind in PARTS.items():
                self._rows[name] += [to_row(record, columns(kind)) for record in getattr(rollout, name)]
            self._tokens += sum(len(n.token_ids) for n in rollout.nodes) + sum(len(s.completion_ids) for s in rollout.steps)
        if self._tokens >= FLUSH_TOKENS or sum(map(len, self._rows.values())) >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        for name, rows in self._rows.items():
            if rows:
                self._writers[name].write_table(arrow.Table.from_pylist(rows, schema=self._writers[name].schema))
                rows.clear()
        self._tokens = 0


@contextmanager
def open_export(path: Path, channels: Sequence[str]) -> Generator[ParquetSink]:
    with creating(path) as part:
        part.mkdir()
        with ExitStack() as stack:
            writers = {table.name: parquet.ParquetWriter(part / f"{table.name}.parquet", _schema(table)) for table in TABLES}
            sink = ParquetSink({name: stack.enter_context(writer) for name, writer in writers.items()})
            yield sink
            sink.flush()


def read_export(path: Path) -> Iterator[GroupHistory]:
    return _merge(path, {table.name: _ParquetRows(path, table) for table in TABLES})


def _merge(path: Path, rows: dict[str, "_ParquetRows"]) -> Iterator[GroupHistory]:
    """Read the files side by side: each has its rows in the order of the groups."""
    while (head := rows["groups"].next()) is not None:
        rollouts = [_read_rollout(path, row, rows) for row in rows["rollouts"].of(head["id"])]
        group = _record(path, "groups", Group, head, _HEAD, rollouts=())
        yield GroupHistory(group=group, rollouts=tuple(rollouts), trained=head["trained"])
    for name, left in rows.items():
        if left.next() is not None:
            raise ConfigError(f"{path / name}.parquet has rows that belong to nothing in the other files; export again")


def _read_rollout(path: Path, row: dict[str, Any], rows: dict[str, "_ParquetRows"]) -> Rollout:
    row = {**row, "message": unescape(row["message"])}
    rollout = _record(path, "rollouts", RolloutRef, row, columns(RolloutRef))
    parts = {
        name: tuple(_record(path, name, kind, found, columns(kind)) for found in rows[name].of(rollout.id))
        for name, kind in PARTS.items()
    }
    ending = _record(path, "rollouts", Rollout, {**row, "message": ""}, _ENDING, rollout=rollout)
    return replace(ending, message=row["message"], **parts)


def _record(path: Path, name: str, kind: type[T], row: dict[str, Any], chosen: list[ParquetColumn], **fields: Any) -> T:
    try:
        return from_row(kind, row, chosen, **fields)
    except (ValueError, LookupError, TypeError) as cause:
        raise ConfigError(f"{path / name}.parquet holds a row that is no {kind.__name__} ({cause}); export again") from cause


class _ParquetRows:
    """The rows of one file, read in order, a batch at a time."""

    def __init__(self, path: Path, table: ParquetTable) -> None:
        self._file, self._table = path / f"{table.name}.parquet", table
        self._rows = self._read()
        self._row = next(self._rows, None)

    def next(self) -> dict[str, Any] | None:
        """Return the current row and advance; None after the last."""
        row = self._row
        self._row = next(self._rows, None) if row is not None else None
        return row

    def of(self, owner: str) -> Iterator[dict[str, Any]]:
        """Yield the next rows that belong to `owner`."""
        while self._row is not None and self._row[self._table.owner] == owner:
            yield self._row
            self._row = next(self._rows, None)

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            with parquet.ParquetFile(self._file) as file:
                self._check(file.schema_arrow)
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    yield from batch.to_pylist()
        except (OSError, arrow.ArrowException) as cause:
            raise ConfigError(f"{self._file}: cannot be read ({cause}); export again") from cause

    def _check(self, schema: Any) -> None:
        known = {b"penstock_pool": FORMAT}.items() <= (schema.metadata or {}).items()
        missing = [column.name for column in self._table.columns if column.name not in {*schema.names, *LATER}]
        if not known or missing:
            more = f"; it has no column {missing[0]!r}" if known else ""
            raise ConfigError(f"{self._file}: not an export that this penstock reads{more}; export again with this version")


def _schema(table: ParquetTable) -> Any:
    return arrow.schema([(column.name, _TYPES[column.kind]) for column in table.columns], metadata={b"penstock_pool": FORMAT})
