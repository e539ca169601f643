"""Records as rows: JSON for plain fields, raw columns for tokens, and a checksum over both that every read verifies."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from penstock.codec import field_names, from_json, pack_floats, pack_ints, pieces, to_json, unpack_floats, unpack_ints
from penstock.errors import PoolError, boundary
from penstock.records import Attempt, End, Grade, Mark, Node, Rollout, Step

T = TypeVar("T")


class Row(NamedTuple):
    """One sealed record. Two records are the same exactly where their rows are."""

    record: bytes
    """The record as JSON, its token columns emptied."""
    columns: tuple[bytes | None, ...]
    """In the order of `COLUMNS`; None where the record has None."""
    crc: int


class Column(NamedTuple):
    """A field that is kept as a raw array."""

    name: str
    empty: tuple[()] | None
    pack: Callable[[Sequence[Any]], bytes]
    unpack: Callable[[bytes], tuple[Any, ...]]


COLUMNS: dict[type[Any], tuple[Column, ...]] = {
    Node: (Column("token_ids", (), pack_ints, unpack_ints),),
    Step: (
        Column("completion_ids", (), pack_ints, unpack_ints),
        Column("logprobs", (), pack_floats, unpack_floats),
        Column("full_logprobs", None, pack_floats, unpack_floats),
        Column("versions", (), pack_ints, unpack_ints),
    ),
}


def column_names(kind: type[Any]) -> list[str]:
    """What the columns of a table for `kind` are called, in the order of a `Row`."""
    return ["record", *(column.name for column in COLUMNS.get(kind, ())), "crc"]


def seal(record: Any, name: str) -> Row:
    """Write `record` down; PoolError where it holds something that could not be read back the same."""
    with boundary(PoolError, f"{name} cannot be stored"):
        columns = COLUMNS.get(record.__class__, ())
        packed = tuple(_pack(column, getattr(record, column.name)) for column in columns)
        text = to_json(_without(record, columns) if columns else record)
        return Row(text, packed, _checksum(text, packed))


def unseal(kind: type[T], row: Row, name: str) -> T:
    """The record that `seal` wrote; PoolError where a bit of it has changed since."""
    with boundary(PoolError, f"{name} cannot be read back"):
        if _checksum(row.record, row.columns) != row.crc:
            raise PoolError(f"{name} is damaged on disk: its checksum does not match; restore the pool from a copy")
        record = from_json(kind, row.record)
        fields = {
            c.name: blob if blob is None else c.unpack(blob) for c, blob in zip(COLUMNS.get(kind, ()), row.columns, strict=True)
        }
        return replace(record, **fields) if fields else record  # pyright: ignore[reportArgumentType, reportUnknownVariableType]


def grade_key(grade: Grade) -> bytes:
    """What a grade is about and who gave it: one reward per key."""
    with boundary(PoolError, f"a grade of rollout {grade.rollout_id!r} cannot be stored"):
        return to_json((grade.source, grade.transcript, grade.step))


def mark_key(mark: Mark) -> int:
    """What a mark is about: the step's index, -1 for the whole rollout."""
    return -1 if mark.step is None else mark.step


class Ending(NamedTuple):
    """How a rollout ended, as stored; `end` is None while it runs."""

    end: str | None
    message: bytes


def pack_message(message: str) -> bytes:
    """Text of any kind, lone surrogates included: an agent's error must not keep its rollout from ending."""
    return message.encode("utf-8", "surrogatepass")


class AttemptRows(NamedTuple):
    """All that is stored of one rollout, each kind in its order."""

    rollout: Row
    ending: Ending
    nodes: Iterable[Row]
    steps: Iterable[Row]
    grades: Iterable[Row]
    marks: Iterable[Row] = ()


def build_attempt(rollout_id: str, rows: AttemptRows) -> Attempt:
    """An attempt from its rows; PoolError names the rollout where one of them is damaged."""
    name = f"of rollout {rollout_id!r}"
    rollout, ending, nodes, steps, grades, marks = rows
    with boundary(PoolError, f"the end {name} cannot be read back"):
        end, message = None if ending.end is None else End(ending.end), ending.message.decode("utf-8", "surrogatepass")
    return Attempt(
        rollout=unseal(Rollout, rollout, f"the record {name}"),
        end=end,
        message=message,
        nodes=tuple(unseal(Node, row, f"a node {name}") for row in nodes),
        steps=tuple(unseal(Step, row, f"a step {name}") for row in steps),
        grades=tuple(unseal(Grade, row, f"a grade {name}") for row in grades),
        marks=tuple(unseal(Mark, row, f"a mark {name}") for row in marks),
    )


def _without(record: Any, columns: tuple[Column, ...]) -> dict[str, Any]:
    """The record's fields, those of `columns` emptied."""
    empty = {column.name: column.empty for column in columns}
    return {name: empty[name] if name in empty else getattr(record, name) for name in field_names(record.__class__)}


def _pack(column: Column, values: Sequence[Any] | None) -> bytes | None:
    return None if values is None else column.pack(values)


def _checksum(record: bytes, columns: tuple[bytes | None, ...]) -> int:
    crc = _crc32(record, 0)
    for column in columns:
        size = -1 if column is None else len(column)
        crc = _crc32(column or b"", zlib.crc32(size.to_bytes(8, "little", signed=True), crc))
    return crc


def _crc32(blob: bytes, crc: int) -> int:
    for piece in pieces(blob, UNLOCKED):
        crc = zlib.crc32(piece, crc)
    return crc


UNLOCKED = 5 * 1024
"""Up to so many bytes, zlib keeps the interpreter's lock."""
