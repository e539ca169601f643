"""Records as table rows, the checksums that every read verifies, and the files of pictures.

A row holds a record's plain fields as JSON, its token columns as raw arrays, and a CRC over both. A second kind of checksum, in the
column `seal`, covers what no single row can show: how many rows a rollout or a group has, and the columns next to the record.
Each picture that a model saw is stored once, under its digest, in the folder `pictures` next to the pool.
"""

import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.codec import field_names, from_json, pack_floats, pack_ints, pieces, to_json, unpack_floats, unpack_ints
from penstock.errors import PoolError, boundary
from penstock.records import End, Grade, Mark, Node, Rollout, RolloutRef, Step, Task
from penstock.system.files import write_file

T = TypeVar("T")


class RecordRow(NamedTuple):
    """One encoded record. Two records are equal exactly if their rows are."""

    record: bytes
    """The record as JSON, its token columns emptied."""
    columns: tuple[bytes | None, ...]
    """In the order of `COLUMNS`; None if the record has None."""
    crc: int


class ArrayColumn(NamedTuple):
    """A field that is stored as a raw array."""

    name: str
    empty: tuple[()] | None
    pack: Callable[[Sequence[Any]], bytes]
    unpack: Callable[[bytes], tuple[Any, ...]]


COLUMNS: dict[type[Any], tuple[ArrayColumn, ...]] = {
    Node: (ArrayColumn("token_ids", (), pack_ints, unpack_ints),),
    Step: (
        ArrayColumn("completion_ids", (), pack_ints, unpack_ints),
        ArrayColumn("logprobs", (), pack_floats, unpack_floats),
        ArrayColumn("full_logprobs", None, pack_floats, unpack_floats),
        ArrayColumn("versions", (), pack_ints, unpack_ints),
    ),
}


LEFT_OUT = frozenset({"policy", "kept", "most_likely", "branch", "replayed", "pictures"})
"""Fields that a stored record lacks where they are empty: an earlier penstock reads the pools of runs that do not use them."""


def column_names(kind: type[Any]) -> list[str]:
    """Return the column names of a `RecordRow` of this kind, in order."""
    return ["record", *(column.name for column in COLUMNS.get(kind, ())), "crc"]


def encode_row(record: Any, name: str) -> RecordRow:
    """Encode `record`; PoolError if it holds a value that would not be read back the same."""
    with boundary(PoolError, f"{name} cannot be stored"):
        columns = COLUMNS.get(record.__class__, ())
        packed = tuple(_pack(column, getattr(record, column.name)) for column in columns)
        text = to_json(_without(record, columns) if columns or isinstance(record, RolloutRef) else record)
        return RecordRow(text, packed, _checksum(text, packed))


def decode_row(kind: type[T], row: RecordRow, name: str) -> T:
    """Decode a row; PoolError if its checksum does not match."""
    with boundary(PoolError, f"{name} cannot be read back"):
        if _checksum(row.record, row.columns) != row.crc:
            raise PoolError(f"{name} is damaged on disk: its checksum does not match; restore the pool from a copy")
        arrays = {
            c.name: blob if blob is None else c.unpack(blob) for c, blob in zip(COLUMNS.get(kind, ()), row.columns, strict=True)
        }
        return from_json(kind, row.record, **arrays)


def grade_key(grade: Grade) -> bytes:
    """Return the identity of a grade: its source, transcript and step."""
    with boundary(PoolError, f"a grade of rollout {grade.rollout_id!r} cannot be stored"):
        return to_json((grade.source, grade.transcript, grade.step))


def mark_key(mark: Mark) -> int:
    """Return the index of the marked step; -1 for the whole rollout."""
    return -1 if mark.step is None else mark.step


class StoredEnd(NamedTuple):
    """The end of a rollout, as stored; `end` is None while it runs."""

    end: str | None
    message: bytes


def pack_message(message: str) -> bytes:
    """Encode any text, also lone surrogates: an agent's error message must not keep its rollout from ending."""
    return message.encode("utf-8", "surrogatepass")


class RolloutRows(NamedTuple):
    """All rows of one rollout, each kind in its order."""

    rollout: RecordRow
    end: StoredEnd
    nodes: Iterable[RecordRow]
    steps: Iterable[RecordRow]
    grades: Iterable[RecordRow]
    marks: Iterable[RecordRow] = ()


def build_rollout(rollout_id: str, rows: RolloutRows) -> Rollout:
    """Decode a rollout; PoolError names the rollout if a row is damaged."""
    name = f"of rollout {rollout_id!r}"
    rollout, stored, nodes, steps, grades, marks = rows
    with boundary(PoolError, f"the end {name} cannot be read back"):
        end = None if stored.end is None else End(stored.end)
        message = stored.message.decode("utf-8", "surrogatepass")
    return Rollout(
        ref=decode_row(RolloutRef, rollout, f"the record {name}"),
        end=end,
        message=message,
        nodes=tuple(decode_row(Node, row, f"a node {name}") for row in nodes),
        steps=tuple(decode_row(Step, row, f"a step {name}") for row in steps),
        grades=tuple(decode_row(Grade, row, f"a grade {name}") for row in grades),
        marks=tuple(decode_row(Mark, row, f"a mark {name}") for row in marks),
    )


def _without(record: Any, columns: tuple[ArrayColumn, ...]) -> dict[str, Any]:
    empty = {column.name: column.empty for column in columns}
    return {
        name: empty[name] if name in empty else getattr(record, name)
        for name in field_names(record.__class__)
        if name not in LEFT_OUT or getattr(record, name)
    }


def _pack(column: ArrayColumn, values: Sequence[Any] | None) -> bytes | None:
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
"""zlib keeps the interpreter's lock for up to this many bytes."""


# Checksums over several rows and columns

_PARTS, _SIZE, _CRC = struct.Struct("<iiiiI"), struct.Struct("<iI"), struct.Struct("<I")


class PartCounts(NamedTuple):
    """How many rows a rollout has in each table; -1 while more may come."""

    nodes: int
    steps: int
    grades: int
    marks: int


class GroupHeader(NamedTuple):
    """The columns of a group that never change."""

    id: str
    channel: str
    seq: int
    min_size: int


def rollout_checksum(rollout_id: str, end: StoredEnd, parts: PartCounts) -> bytes:
    """Pack a rollout's row counts with a checksum over them and its end."""
    return _PARTS.pack(*parts, _checksum_values(rollout_id, *end, *parts))


def group_checksum(header: GroupHeader, size: int) -> bytes:
    """Pack a group's number of places with a checksum over it and the header."""
    return _SIZE.pack(size, _checksum_values(*header, size))


def ledger_checksum(group_id: str, lease_id: str, version: int) -> bytes:
    return _CRC.pack(_checksum_values(group_id, lease_id, version))


def verify_rollout(rollout_id: str, end: StoredEnd, checksum: bytes | None, parts: PartCounts | None) -> None:
    """Compare an end, and the row counts unless `parts` is None, with the checksum. Rollouts of old formats have none."""
    if checksum is None:
        return
    name = f"the end of rollout {rollout_id!r}"
    *counts, crc = _unpack(_PARTS, checksum, name)
    if crc != _checksum_values(rollout_id, *end, *counts):
        raise damaged(name, "its checksum does not match")
    for table, stored, found in zip(PartCounts._fields, counts, parts or (), strict=False):
        if stored not in (-1, found):
            raise damaged(f"rollout {rollout_id!r}", f"it has {stored} {table}, but {found} are found")


def verify_records(rollout_id: str, rollout: Rollout) -> None:
    """PoolError if a record belongs to another rollout or is there twice."""
    parts: Iterable[Any] = (*rollout.nodes, *rollout.steps, *rollout.grades, *rollout.marks)
    if rollout.ref.id != rollout_id or any(part.rollout_id != rollout_id for part in parts):
        raise damaged(f"rollout {rollout_id!r}", "it leads to another one's records")
    steps, nodes = [step.index for step in rollout.steps], [node.id for node in rollout.nodes]
    for keys in (steps, nodes, [grade_key(grade) for grade in rollout.grades], [mark_key(mark) for mark in rollout.marks]):
        if len(set(keys)) < len(keys):
            raise damaged(f"rollout {rollout_id!r}", "a record is found twice")


def verify_graph(rollout_id: str, rollout: Rollout) -> None:
    """PoolError if a step or node is missing: every node was stored with a step, and every parent is a step."""
    steps, nodes = {step.index for step in rollout.steps}, {node.id for node in rollout.nodes}
    parents = {node.parent for node in rollout.nodes if node.parent is not None}
    if {step.node for step in rollout.steps} != nodes or not parents <= steps:
        raise damaged(f"rollout {rollout_id!r}", "a step or a node of it is missing")


def verify_group(header: GroupHeader, checksum: bytes | None, task: Task, rollouts: Collection[RolloutRef]) -> None:
    """PoolError if a place is missing or a rollout belongs to another group. Groups of old formats have no checksum."""
    name = f"group {header.id!r}"
    if any((rollout.group_id, rollout.channel, rollout.task_id) != (header.id, header.channel, task.id) for rollout in rollouts):
        raise damaged(name, "it leads to another one's rollouts or task")
    if len({rollout.place for rollout in rollouts}) < len(rollouts):
        raise damaged(name, "a place of it is found twice")
    if checksum is None:
        return
    size, crc = _unpack(_SIZE, checksum, name)
    if crc != _checksum_values(*header, size):
        raise damaged(name, "its checksum does not match")
    if size != len(rollouts):
        raise damaged(name, f"it has {size} places, but {len(rollouts)} are found")


def verify_ledger(lines: Sequence[tuple[str, str, int, bytes | None]], trained: int) -> None:
    """PoolError if a line was changed, is there twice or is missing: there must be one per `trained` group."""
    for group_id, lease_id, version, checksum in lines:
        if checksum is not None and _unpack(_CRC, checksum, "the ledger") != (_checksum_values(group_id, lease_id, version),):
            raise damaged("the ledger", f"the line of group {group_id!r} does not match its checksum")
    if len({line[0] for line in lines}) != len(lines) or len(lines) != trained:
        raise damaged("the ledger", f"{trained} groups were trained, but it has {len(lines)} lines")


def damaged(name: str, problem: str) -> PoolError:
    return PoolError(f"{name} is damaged on disk: {problem}; `penstock pool verify` names all that is hit, then restore a copy")


def _checksum_values(*values: str | int | bytes | None) -> int:
    return zlib.crc32(repr(values).encode("utf-8", "surrogatepass"))


def _unpack(form: struct.Struct, packed: bytes, name: str) -> tuple[int, ...]:
    try:
        return form.unpack(packed)
    except (struct.error, TypeError) as cause:
        raise damaged(name, "its checksum cannot be read") from cause


FOLDER = "pictures"
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_BYTES = 4 << 30
"""The limit for all pictures of a run."""


class PictureStore:
    """The pictures of the run in `folder`. Several processes may write there; blocks: call it in a thread."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder / FOLDER
        self._max_bytes = max_bytes

    def put(self, content: bytes) -> bool:
        """Store a picture durably. Returns False if there is no room for it."""
        path = self.path(sha256(content).hexdigest())
        if path.exists():
            return True
        if self.size_bytes() + len(content) > self._max_bytes:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, content)
        except OSError as cause:
            raise PoolError(f"{path}: a picture cannot be stored: {cause.strerror or cause}") from cause
        return True

    def read(self, digest: str) -> bytes:
        """Return the picture's bytes; PoolError if they are missing or damaged."""
        if not DIGEST.fullmatch(digest):  # a caller's text must not become a path
            raise PoolError(f"{digest[:80]!r} is not the digest of a picture")
        try:
            content = self.path(digest).read_bytes()
        except OSError as cause:
            raise PoolError(f"picture {digest} is not in {self._folder}: {cause.strerror or cause}") from cause
        if sha256(content).hexdigest() != digest:
            raise PoolError(f"picture {digest} is damaged on disk; restore {self._folder} from a copy")
        return content

    def path(self, digest: str) -> Path:
        return self._folder / digest

    def size_bytes(self) -> int:
        """Returns the size of complete pictures; files that another process is still writing have other names."""
        files = self._folder.iterdir() if self._folder.exists() else ()
        return sum(file.stat().st_size for file in files if DIGEST.fullmatch(file.name))
