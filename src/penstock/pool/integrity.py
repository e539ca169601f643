"""Checksums over what rows say together: they tell when an index has lost a row, or an end or a number has changed.

A row's own checksum says nothing of rows that are gone, nor of columns that change after it was written. So a rollout that was
graded, marked or ended carries the number of its parts, a group that of its places, and each is sealed with its other columns.
"""

import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from penstock.errors import PoolError
from penstock.pool.rows import Ending, grade_key, mark_key
from penstock.records import Attempt, Rollout, Task

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
    return _PARTS.pack(*parts, _checksum(rollout_id, ending.end, ending.message, *parts))


def seal_group(opened: Opened, size: int) -> bytes:
    """What is kept of a group's places."""
    return _SIZE.pack(size, _checksum(*opened, size))


def seal_line(group_id: str, lease_id: str, version: int) -> bytes:
    """What is kept beside a line of the ledger."""
    return _LINE.pack(_checksum(group_id, lease_id, version))


def check_rollout(rollout_id: str, ending: Ending, seal: bytes | None, parts: Parts | None) -> None:
    """PoolError where the end is not what was sealed or, unless `parts` is None, rows are missing. Old rollouts have no seal."""
    if seal is None:
        return
    *numbers, crc = _unpack(_PARTS, seal, f"the end of rollout {rollout_id!r}")
    if crc != _checksum(rollout_id, ending.end, ending.message, *numbers):
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
    if crc != _checksum(*opened, size):
        raise damaged(name, "its checksum does not match")
    if size != len(rollouts):
        raise damaged(name, f"it has {size} places, but {len(rollouts)} are found")


def check_ledger(lines: Sequence[tuple[str, str, int, bytes | None]], trained: int) -> None:
    """PoolError where a line was changed, comes twice or is missing: there are as many as groups were `trained`."""
    for group_id, lease_id, version, seal in lines:
        if seal is not None and _unpack(_LINE, seal, "the ledger") != (_checksum(group_id, lease_id, version),):
            raise damaged("the ledger", f"the line of group {group_id!r} does not match its checksum")
    if len({line[0] for line in lines}) != len(lines) or len(lines) != trained:
        raise damaged("the ledger", f"{trained} groups were trained, but it has {len(lines)} lines")


def damaged(name: str, what: str) -> PoolError:
    """Something that was stored is not there any more, or not as it was."""
    return PoolError(f"{name} is damaged on disk: {what}; `penstock pool verify` names all that is hit, then restore a copy")


def _checksum(*values: str | int | bytes | None) -> int:
    return zlib.crc32(repr(values).encode("utf-8", "surrogatepass"))


def _unpack(form: struct.Struct, seal: bytes, name: str) -> tuple[int, ...]:
    try:
        return form.unpack(seal)
    except (struct.error, TypeError) as cause:
        raise damaged(name, "its seal cannot be read") from cause
