"""The reads of a pool, in SQL. What is read is checked against its checksums."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.pool import rules
from penstock.pool.base import Change, Cursor, PoolDatabase, PoolStats
from penstock.pool.rows import (
    GroupHeader,
    PartCounts,
    RecordRow,
    RolloutRows,
    StoredEnd,
    build_rollout,
    column_names,
    damaged,
    decode_row,
    verify_graph,
    verify_group,
    verify_ledger,
    verify_records,
    verify_rollout,
)
from penstock.pool.rules import GroupState, sum_counters
from penstock.pool.writes import chunks, placeholders
from penstock.records import Grade, Group, Mark, Node, Rollout, RolloutRef, Step, Task

_NODES = f"SELECT {', '.join(column_names(Node))} FROM nodes WHERE rollout_id = ? AND id >= ? ORDER BY id"
_STEPS = f"SELECT {', '.join(column_names(Step))} FROM steps WHERE rollout_id = ? AND id >= ? ORDER BY id"
_GRADES = f"SELECT {', '.join(column_names(Grade))} FROM grades WHERE rollout_id = ? ORDER BY position"
_MARKS = f"SELECT {', '.join(column_names(Mark))} FROM marks WHERE rollout_id = ? ORDER BY id"
_PARTS: dict[str, tuple[type[Any], str]] = {
    "nodes": (Node, "id"),
    "steps": (Step, "id"),
    "grades": (Grade, "position"),
    "marks": (Mark, "id"),
}
"""The tables of a rollout's records: their kind, and the column that orders them."""
_ROLLOUT = """SELECT record, crc, ended, message, seal,
    EXISTS (SELECT 1 FROM nodes WHERE rollout_id = r.id AND id >= ?),
    EXISTS (SELECT 1 FROM steps WHERE rollout_id = r.id AND id >= ?),
    EXISTS (SELECT 1 FROM grades WHERE rollout_id = r.id),
    EXISTS (SELECT 1 FROM marks WHERE rollout_id = r.id)
    FROM rollouts AS r WHERE id = ?"""
"""Also reports which tables have rows: each statement saved is one wait less for the interpreter's lock."""
_GROUP = "SELECT id, seq, channel, min_size, seal, record, crc FROM groups"


def read_rollout(database: PoolDatabase, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Rollout:
    """Read a rollout, from a step and a node on."""
    found = database.execute(_ROLLOUT, (first_node, first_step, rollout_id)).fetchone()
    if found is None:
        raise rules.unknown_rollout(rollout_id)
    record, crc, ended, message, checksum, *non_empty = found
    end = StoredEnd(ended, message)
    numbered = ((_NODES, (rollout_id, first_node)), (_STEPS, (rollout_id, first_step)))
    queries = (*numbered, (_GRADES, (rollout_id,)), (_MARKS, (rollout_id,)))
    nodes, steps, grades, marks = (
        _rows(database.execute(*query)) if any_rows else iter(()) for query, any_rows in zip(queries, non_empty, strict=True)
    )
    rows = RolloutRows(RecordRow(record, (), crc), end, nodes, steps, grades, marks)
    return _verified_rollout(rollout_id, rows, checksum, is_whole=not first_step and not first_node)


def read_rollouts(database: PoolDatabase, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Read whole rollouts, with one statement for each table instead of each rollout."""
    rollouts: list[Rollout] = []
    for ids in chunks(rollout_ids):
        query = f"SELECT id, record, crc, ended, message, seal FROM rollouts WHERE id IN ({placeholders(ids)})"
        heads = {name: head for name, *head in database.execute(query, ids).fetchall()}
        parts = [_part_rows(database, table, ids) for table in _PARTS]
        for name in ids:
            if name not in heads:
                raise rules.unknown_rollout(name)
            record, crc, ended, message, checksum = heads[name]
            rows = RolloutRows(RecordRow(record, (), crc), StoredEnd(ended, message), *(part.get(name, []) for part in parts))
            rollouts.append(_verified_rollout(name, rows, checksum, is_whole=True))
    return rollouts


def _part_rows(database: PoolDatabase, table: str, rollout_ids: Sequence[str]) -> dict[str, list[RecordRow]]:
    kind, order = _PARTS[table]
    chosen = f"FROM {table} WHERE rollout_id IN ({placeholders(rollout_ids)}) ORDER BY rollout_id, {order}"
    found: dict[str, list[RecordRow]] = {}
    for name, record, *columns, crc in database.execute(
        f"SELECT rollout_id, {', '.join(column_names(kind))} {chosen}", rollout_ids
    ):
        found.setdefault(name, []).append(RecordRow(record, tuple(columns), crc))
    return found


def _verified_rollout(rollout_id: str, rows: RolloutRows, checksum: bytes | None, *, is_whole: bool) -> Rollout:
    rollout = build_rollout(rollout_id, rows)
    verify_rollout(rollout_id, rows.end, checksum, _parts(rollout) if is_whole else None)
    verify_records(rollout_id, rollout)
    if is_whole:
        verify_graph(rollout_id, rollout)
    return rollout


def read_task(database: PoolDatabase, rollout_id: str) -> Task:
    query = "SELECT r.record, r.crc, g.record, g.crc FROM rollouts AS r JOIN groups AS g ON g.id = r.group_id WHERE r.id = ?"
    found = database.execute(query, (rollout_id,)).fetchone()
    if found is None:
        raise rules.unknown_rollout(rollout_id)
    rollout = decode_row(RolloutRef, RecordRow(found[0], (), found[1]), f"the record of rollout {rollout_id!r}")
    task = decode_row(Task, RecordRow(found[2], (), found[3]), f"the task of rollout {rollout_id!r}")
    if (rollout.id, rollout.task_id) != (rollout_id, task.id):
        raise damaged(f"rollout {rollout_id!r}", "it leads to another one's record or task")
    return task


def read_groups(database: PoolDatabase, group_ids: Iterable[str]) -> list[Group]:
    groups: list[Group] = []
    for group_id in group_ids:
        row = database.execute(f"{_GROUP} WHERE id = ?", (group_id,)).fetchone()
        if row is None:
            raise damaged(f"group {group_id!r}", "it is not found under its id")
        groups.append(_build_group(database, row))
    return groups


def list_groups(database: PoolDatabase, channel: str, *, first_seq: int, limit: int) -> list[Group]:
    query = f"{_GROUP} WHERE channel = ? AND seq >= ? ORDER BY seq, id LIMIT ?"
    return [_build_group(database, row) for row in database.execute(query, (channel, first_seq, max(limit, 0))).fetchall()]


def list_rollouts(database: PoolDatabase, group_id: str) -> list[RolloutRef]:
    stored = database.execute("SELECT id, record, crc FROM rollouts WHERE group_id = ?", (group_id,)).fetchall()
    found = [decode_row(RolloutRef, RecordRow(record, (), crc), f"the record of rollout {name!r}") for name, record, crc in stored]
    if any(rollout.group_id != group_id for rollout in found):
        raise damaged(f"group {group_id!r}", "it leads to another one's rollouts")
    return sorted(found, key=lambda rollout: (rollout.place, rollout.attempt))


def list_channels(database: PoolDatabase) -> list[str]:
    return sorted(row[0] for row in database.execute("SELECT DISTINCT channel FROM tally WHERE kind = 'state'"))


def list_unfinished(database: PoolDatabase, channel: str) -> list[Group]:
    query = f"{_GROUP} WHERE channel = ? AND state IN (?, ?) ORDER BY seq, id"
    return [_build_group(database, row) for row in database.execute(query, (channel, GroupState.OPEN, GroupState.SHORT)).fetchall()]


def read_ledger(database: PoolDatabase) -> list[tuple[str, int]]:
    lines = database.execute("SELECT group_id, lease_id, version, seal FROM ledger ORDER BY position").fetchall()
    (trained,) = database.execute("SELECT sum(n) FROM tally WHERE kind = 'state' AND name = ?", (GroupState.TRAINED,)).fetchone()
    verify_ledger(lines, int(trained or 0))
    return [(group_id, version) for group_id, _, version, _ in lines]


def read_changes(database: PoolDatabase, after: int, limit: int) -> list[Change]:
    query = f"SELECT position, kind, channel, id FROM changes WHERE position > ? AND {database.SETTLED} ORDER BY position LIMIT ?"
    return [Change(*row) for row in database.execute(query, (after, max(limit, 0)))]


def read_position(database: PoolDatabase) -> int:
    query = f"SELECT position FROM changes WHERE {database.SETTLED} ORDER BY position DESC LIMIT 1"
    row = database.execute(query).fetchone()
    return row[0] if row else 0


def read_stats(database: PoolDatabase, channel: str | None) -> PoolStats:
    value = "CASE kind WHEN 'top' THEN max(n) ELSE sum(n) END"
    of_channel, values = ("", ()) if channel is None else ("WHERE channel = ?", (channel,))  # a condition that the index serves
    rows = database.execute(f"SELECT kind, name, {value} FROM tally {of_channel} GROUP BY kind, name", values)
    return sum_counters((kind, name, int(n)) for kind, name, n in rows)


def _build_group(database: PoolDatabase, row: tuple[Any, ...]) -> Group:
    group_id, seq, channel, min_size, checksum, record, crc = row
    query = "SELECT id FROM rollouts WHERE group_id = ? AND current = 1 ORDER BY place"
    rollouts = read_rollouts(database, [found[0] for found in database.execute(query, (group_id,)).fetchall()])
    task = decode_row(Task, RecordRow(record, (), crc), f"the task of group {group_id!r}")
    verify_group(GroupHeader(group_id, channel, seq, min_size), checksum, task, [rollout.ref for rollout in rollouts])
    return Group(id=group_id, seq=seq, task=task, channel=channel, rollouts=tuple(rollouts))


def _parts(rollout: Rollout) -> PartCounts:
    return PartCounts(len(rollout.nodes), len(rollout.steps), len(rollout.grades), len(rollout.marks))


def _rows(cursor: Cursor) -> Iterator[RecordRow]:
    for record, *columns, crc in cursor:
        yield RecordRow(record, tuple(columns), crc)
