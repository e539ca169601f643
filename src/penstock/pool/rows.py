"""Records as rows: JSON for plain fields, raw columns for tokens, and a checksum over both that every read verifies."""

import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from penstock.codec import field_names, from_json, pack_floats, pack_ints, pieces, to_json, unpack_floats, unpack_ints
from penstock.errors import PoolError, boundary
from penstock.records import Attempt, End, Grade, Mark, Node, Rollout, Step, Task

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


_PARTS, _SIZE, _LINE = struct.Struct("<iiiiI"), struct.Struct("<iI"), struct.Struct("<I")


class Parts(NamedTuple):
    """How many rows a rollout has in each table; -1 where more may come."""

    nodes: int
    steps: int
    grades: int
    marks: int


class Opened(NamedTuple):
    """What a group was opened with."""

    id: str
    channel: str
    seq: int
    min_size: int


def seal_rollout(rollout_id: str, ending: Ending, parts: Parts) -> bytes:
    """What is kept beside the end of a rollout."""
    return _PARTS.pack(*parts, _combined_checksum(rollout_id, ending.end, ending.message, *parts))


def seal_group(opened: Opened, size: int) -> bytes:
    """What is kept of a group's places."""
    return _SIZE.pack(size, _combined_checksum(*opened, size))


def seal_line(group_id: str, lease_id: str, version: int) -> bytes:
    """What is kept beside a line of the ledger."""
    return _LINE.pack(_combined_checksum(group_id, lease_id, version))


def check_rollout(rollout_id: str, ending: Ending, seal: bytes | None, parts: Parts | None) -> None:
    """PoolError where the end is not what was sealed or, unless `parts` is None, rows are missing. Old rollouts have no seal."""
    if seal is None:
        return
    *numbers, crc = _unpack(_PARTS, seal, f"the end of rollout {rollout_id!r}")
    if crc != _combined_checksum(rollout_id, ending.end, ending.message, *numbers):
        raise damaged(f"the end of rollout {rollout_id!r}", "its checksum does not match")
    for name, stored, read in zip(Parts._fields, numbers, parts or (), strict=False):
        if stored not in (-1, read):
            raise damaged(f"rollout {rollout_id!r}", f"it has {stored} {name}, but {read} are found")


def check_attempt(rollout_id: str, attempt: Attempt) -> None:
    """PoolError where a record is another rollout's, comes twice, or what it continues is missing."""
    parts: Iterable[Any] = (*attempt.nodes, *attempt.steps, *attempt.grades, *attempt.marks)
    if attempt.rollout.id != rollout_id or any(part.rollout_id != rollout_id for part in parts):
        raise damaged(f"rollout {rollout_id!r}", "it leads to another one's records")
    steps, nodes = [step.index for step in attempt.steps], [node.id for node in attempt.nodes]
    for keys in (steps, nodes, [grade_key(grade) for grade in attempt.grades], [mark_key(mark) for mark in attempt.marks]):
        if len(set(keys)) < len(keys):
            raise damaged(f"rollout {rollout_id!r}", "a record is found twice")


def check_graph(rollout_id: str, attempt: Attempt) -> None:
    """PoolError where a step's node or a node's step is missing: each node came with a step."""
    steps, nodes = {step.index for step in attempt.steps}, {node.id for node in attempt.nodes}
    parents = {node.parent for node in attempt.nodes if node.parent is not None}
    if {step.node for step in attempt.steps} != nodes or not parents <= steps:
        raise damaged(f"rollout {rollout_id!r}", "a step or a node of it is missing")


def check_group(opened: Opened, seal: bytes | None, task: Task, rollouts: Collection[Rollout]) -> None:
    """PoolError where a place is missing, or a rollout belongs elsewhere. Old groups have no seal."""
    name = f"group {opened.id!r}"
    if any((rollout.group_id, rollout.channel, rollout.task_id) != (opened.id, opened.channel, task.id) for rollout in rollouts):
        raise damaged(name, "it leads to another one's rollouts or task")
    if len({rollout.place for rollout in rollouts}) < len(rollouts):
        raise damaged(name, "a place of it is found twice")
    if seal is None:
        return
    size, crc = _unpack(_SIZE, seal, name)
    if crc != _combined_checksum(*opened, size):
        raise damaged(name, "its checksum does not match")
    if size != len(rollouts):
        raise damaged(name, f"it has {size} places, but {len(rollouts)} are found")


def check_ledger(lines: Sequence[tuple[str, str, int, bytes | None]], trained: int) -> None:
    """PoolError where a line was changed, comes twice or is missing: there are as many as groups were `trained`."""
    for group_id, lease_id, version, seal in lines:
        if seal is not None and _unpack(_LINE, seal, "the ledger") != (_combined_checksum(group_id, lease_id, version),):
            raise damaged("the ledger", f"the line of group {group_id!r} does not match its checksum")
    if len({line[0] for line in lines}) != len(lines) or len(lines) != trained:
        raise damaged("the ledger", f"{trained} groups were trained, but it has {len(lines)} lines")


def damaged(name: str, what: str) -> PoolError:
    """Something that was stored is not there any more, or not as it was."""
    return PoolError(f"{name} is damaged on disk: {what}; `penstock pool verify` names all that is hit, then restore a copy")


def _combined_checksum(*values: str | int | bytes | None) -> int:
    return zlib.crc32(repr(values).encode("utf-8", "surrogatepass"))


def _unpack(form: struct.Struct, seal: bytes, name: str) -> tuple[int, ...]:
    try:
        return form.unpack(seal)
    except (struct.error, TypeError) as cause:
        raise damaged(name, "its seal cannot be read") from cause
