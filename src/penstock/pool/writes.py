"""The writes of a pool, in SQL. Each runs inside a transaction; if it raises, the caller rolls it back.

Steps and ends come in large numbers, so that several are written with few statements (`append_all`, `end_all`).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from penstock.pool import rules
from penstock.pool.base import ChangeKind, CounterChange, GroupLimit, PoolDatabase
from penstock.pool.rows import (
    GroupHeader,
    PartCounts,
    RecordRow,
    StoredEnd,
    column_names,
    encode_row,
    grade_key,
    group_checksum,
    mark_key,
    pack_message,
    rollout_checksum,
)
from penstock.pool.rules import GroupState, VersionRange
from penstock.pool.writer import BatchOperation
from penstock.records import End, Grade, Mark, Node, RolloutRef, Step, Task

T = TypeVar("T")

MAX_ROWS = 1000
"""Rows of one INSERT. SQLite takes 32,766 values per statement, PostgreSQL twice as many; a row has at most ten."""


def _insert(table: str, kind: type[Any]) -> str:
    names = ["rollout_id", "id", *column_names(kind)]
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' for _ in names)}) ON CONFLICT DO NOTHING"


_TABLES: dict[str, type[Any]] = {"nodes": Node, "steps": Step, "grades": Grade}
_INSERTS = {table: _insert(table, kind) for table, kind in _TABLES.items()}
_READS = {
    table: f"SELECT {', '.join(column_names(kind))} FROM {table} WHERE rollout_id = ? AND id = ?" for table, kind in _TABLES.items()
}


class RunningRollout(NamedTuple):
    """A rollout that has not ended."""

    channel: str
    oldest: int | None


def lock_running(database: PoolDatabase, rollout_id: str, name: str) -> RunningRollout:
    """Lock the rollout for a write; PoolError if it has ended, naming the write by `name`."""
    query = f"SELECT ended, channel, oldest FROM rollouts WHERE id = ?{database.LOCK}"
    row = database.execute(query, (rollout_id,)).fetchone()
    if row is None:
        raise rules.unknown_rollout(rollout_id)
    if row[0] is not None:
        raise rules.too_late(name, End(row[0]))
    return RunningRollout(row[1], row[2])


def is_stored(database: PoolDatabase, table: str, rollout_id: str, key: int) -> bool:
    return database.execute(f"SELECT 1 FROM {table} WHERE rollout_id = ? AND id = ?", (rollout_id, key)).fetchone() is not None


def insert_row(database: PoolDatabase, table: str, key: tuple[str, Any], row: RecordRow, name: str) -> bool:
    """Insert a row. Returns False if the same row is stored; PoolConflict if a different one is."""
    cursor = database.execute(_INSERTS[table], (*key, row.record, *row.columns, row.crc))
    if cursor.rowcount:
        return True
    if database.execute(_READS[table], key).fetchone() != (row.record, *row.columns, row.crc):
        raise rules.conflict(name)
    return False


def insert_rows(database: PoolDatabase, table: str, rows: list[tuple[tuple[str, Any], RecordRow]]) -> bool:
    """Insert rows. Returns False if one of the keys is taken, whatever its content."""
    if not rows:
        return True
    values = [value for key, row in rows for value in (*key, row.record, *row.columns, row.crc)]
    return database.execute(_insert_many(table, len(rows)), values).rowcount == len(rows)


@cache
def _insert_many(table: str, rows: int) -> str:
    head, _, tail = _INSERTS[table].partition(" VALUES ")
    values, _, conflict = tail.partition(" ON ")
    return f"{head} VALUES {', '.join([values] * rows)} ON {conflict}"


@cache
def _count_of(table: str, keys: int) -> str:
    # a join: SQLite would scan the whole table for `(rollout_id, id) IN …`
    first, rest = "(CAST(? AS TEXT), CAST(? AS BIGINT))", ", (?, ?)" * (keys - 1)
    wanted = f"WITH wanted (rollout, number) AS (VALUES {first}{rest})"
    return f"{wanted} SELECT count(*) FROM wanted JOIN {table} ON rollout_id = rollout AND id = number"


def all_stored(database: PoolDatabase, table: str, keys: set[tuple[str, int]]) -> bool:
    if not keys:
        return True
    fields = [field for key in keys for field in key]
    return database.execute(_count_of(table, len(keys)), fields).fetchone()[0] == len(keys)


def placeholders(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values))


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[first : first + MAX_ROWS] for first in range(0, len(values), MAX_ROWS))


def row_placeholders(width: int, rows: int) -> str:
    return ", ".join([f"({', '.join('?' * width)})"] * rows)


def count_move(database: PoolDatabase, channel: str, before: str, after: str, n: int = 1) -> None:
    """Count `n` groups that changed their state."""
    database.add_counts(channel, [CounterChange("state", str(before), -n), CounterChange("state", str(after), n)])


class NewNode(NamedTuple):
    """The node that a step added, encoded."""

    parent: int | None
    reason: str | None
    tokens: int
    row: RecordRow


class AppendRequest(NamedTuple):
    """A step, encoded."""

    rollout_id: str
    step: int
    node: int
    new_node: NewNode | None
    """None if the node is stored."""
    sampled: int
    versions: VersionRange
    row: RecordRow


def encode_append(step: Step, node: Node | None) -> AppendRequest:
    rules.check_step(step, node)
    row, new_node = encode_row(step, rules.step_name(step.rollout_id, step.index)), None
    if node is not None:
        node_row = encode_row(node, rules.node_name(node.rollout_id, node.id))
        new_node = NewNode(node.parent, node.reason, len(node.token_ids), node_row)
    versions = rules.version_range(step.versions)
    return AppendRequest(step.rollout_id, step.index, step.node, new_node, len(step.completion_ids), versions, row)


def append(database: PoolDatabase, request: AppendRequest) -> None:
    rollout_id, name = request.rollout_id, rules.step_name(request.rollout_id, request.step)
    channel, oldest = lock_running(database, rollout_id, name)
    new = None
    if request.new_node is None:
        if not is_stored(database, "nodes", rollout_id, request.node):
            raise rules.missing_node(rollout_id, request.step, request.node)
    elif insert_row(database, "nodes", (rollout_id, request.node), request.new_node.row, rules.node_name(rollout_id, request.node)):
        new = request.new_node
        if new.parent is not None and not is_stored(database, "steps", rollout_id, new.parent):
            raise rules.missing_parent(rollout_id, request.node, new.parent)
    if not insert_row(database, "steps", (rollout_id, request.step), request.row, name):
        return
    lowest = rules.oldest_version((oldest, request.versions.oldest))
    if lowest != oldest:
        database.execute("UPDATE rollouts SET oldest = ? WHERE id = ?", (lowest, rollout_id))
    database.add_counts(channel, _append_counts([request], [new] if new else []))


def append_all(database: PoolDatabase, requests: Sequence[AppendRequest]) -> bool:
    """Store several steps with few statements. Returns False, perhaps half done, if one of them is not plainly new.

    Each statement releases the interpreter's lock and waits for it again, which costs more than the statement itself.
    """
    names = {request.rollout_id for request in requests}
    chosen = f"FROM rollouts WHERE id IN ({placeholders(names)}) ORDER BY id{database.LOCK}"  # in order: no deadlocks
    found = database.select(("id", "ended", "channel", "oldest"), chosen, sorted(names))
    running = {name: RunningRollout(channel, oldest) for name, ended, channel, oldest in found if ended is None}
    nodes = [(request.rollout_id, request.node, request.new_node) for request in requests if request.new_node is not None]
    if len(running) < len(names):
        return False
    stored = insert_rows(database, "nodes", [((rollout_id, number), node.row) for rollout_id, number, node in nodes])
    stored = stored and insert_rows(database, "steps", [((each.rollout_id, each.step), each.row) for each in requests])
    parents = {(rollout_id, node.parent) for rollout_id, _, node in nodes if node.parent is not None}
    if not stored or not all_stored(database, "steps", parents):
        return False
    if not all_stored(database, "nodes", {(each.rollout_id, each.node) for each in requests if each.new_node is None}):
        return False
    lowered: dict[str, int | None] = {}
    for request in requests:
        channel, oldest = running[request.rollout_id]
        lowest = rules.oldest_version((oldest, request.versions.oldest))
        if lowest != oldest:
            running[request.rollout_id] = RunningRollout(channel, lowest)
            lowered[request.rollout_id] = lowest
    for lowest in set(lowered.values()):
        changed = [name for name, value in lowered.items() if value == lowest]
        database.execute(f"UPDATE rollouts SET oldest = ? WHERE id IN ({placeholders(changed)})", (lowest, *changed))
    for channel in {rollout.channel for rollout in running.values()}:
        mine = [request for request in requests if running[request.rollout_id].channel == channel]
        database.add_counts(channel, _append_counts(mine, [each.new_node for each in mine if each.new_node is not None]))
    return True


APPEND = BatchOperation("append", append, append_all)


def _append_counts(steps: Sequence[AppendRequest], nodes: Sequence[NewNode]) -> list[CounterChange]:
    """Return what these steps and new nodes of a channel add to its running counts."""
    breaks = Counter(node.reason for node in nodes if node.reason is not None)
    return [
        CounterChange("count", "steps", len(steps)),
        CounterChange("count", "tokens", sum(step.sampled for step in steps)),
        CounterChange("top", "version", max(step.versions.newest for step in steps)),
        *([CounterChange("count", "prompt_tokens", sum(node.tokens for node in nodes))] if nodes else []),
        *(CounterChange("break", reason, n) for reason, n in breaks.items()),
    ]


class GradeRow(NamedTuple):
    key: tuple[str, bytes]
    row: RecordRow
    name: str


class EndRequest(NamedTuple):
    """An end and the grades that come with it, encoded."""

    rollout_id: str
    end: StoredEnd
    grades: list[GradeRow]
    only_grades: bool = False
    """Refuses if the rollout has been graded before."""


def encode_grade(value: Grade) -> GradeRow:
    rules.check_grade(value)
    name = rules.grade_name(value)
    return GradeRow((value.rollout_id, grade_key(value)), encode_row(value, name), name)


def encode_end(rollout_id: str, end: End, message: str, grades: Sequence[Grade], *, only_grades: bool = False) -> EndRequest:
    rules.check_grades(rollout_id, grades)
    stored = StoredEnd(End(end).value, pack_message(message))
    return EndRequest(rollout_id, stored, [encode_grade(each) for each in grades], only_grades)


def grade(database: PoolDatabase, request: GradeRow) -> None:
    rollout_id = request.key[0]
    channel, _ = lock_running(database, rollout_id, request.name)
    if insert_row(database, "grades", request.key, request.row, request.name):
        _update_checksum(database, rollout_id)
        database.log_changes([("graded", channel, rollout_id)])


def mark(database: PoolDatabase, value: Mark, row: RecordRow) -> bool:
    """Store a mark over an earlier one. Returns whether a trainer can still see it."""
    # locks the rollout alone: with the join below, PostgreSQL would lock its group too and wait for a trainer
    database.execute(f"SELECT 1 FROM rollouts WHERE id = ?{database.LOCK}", (value.rollout_id,))
    query = "SELECT r.channel, g.state FROM rollouts AS r JOIN groups AS g ON g.id = r.group_id WHERE r.id = ?"
    found = database.execute(query, (value.rollout_id,)).fetchone()
    if found is None:
        raise rules.unknown_rollout(value.rollout_id)
    if value.step is not None and not is_stored(database, "steps", value.rollout_id, value.step):
        raise rules.missing_step(value)
    database.execute(
        """INSERT INTO marks (rollout_id, id, record, crc) VALUES (?, ?, ?, ?)
           ON CONFLICT (rollout_id, id) DO UPDATE SET record = excluded.record, crc = excluded.crc""",
        (value.rollout_id, mark_key(value), row.record, row.crc),
    )
    _update_checksum(database, value.rollout_id)
    database.log_changes([("marked", found[0], value.rollout_id)])
    return GroupState(found[1]) in rules.UNCLAIMED


class _LockedRollout(NamedTuple):
    """A rollout that is to end; its row and its group's are locked."""

    ended: str | None
    channel: str
    group_id: str
    min_size: int
    graded: int
    """1 if it has a grade."""


def end(database: PoolDatabase, request: EndRequest) -> bool:
    """Store the rollout's grades and end, and close its group with the last one. Returns False if it had ended before."""
    rollout = _lock_rollouts(database, {request.rollout_id}).get(request.rollout_id)
    if rollout is None:
        raise rules.unknown_rollout(request.rollout_id)
    if rollout.ended is not None:
        if request.grades:
            raise rules.too_late(request.grades[0].name, End(rollout.ended))
        return False
    if request.only_grades and rollout.graded:
        raise rules.graded_before(request.rollout_id)
    new = [grade for grade in request.grades if insert_row(database, "grades", grade.key, grade.row, grade.name)]
    _store_ends(database, [request], {request.rollout_id: rollout}, graded=[request.rollout_id] * len(new))
    return True


def end_all(database: PoolDatabase, requests: Sequence[EndRequest]) -> bool:
    """End several rollouts with few statements. Returns False, perhaps half done, if one of the ends is not plainly new."""
    names, grades = {request.rollout_id for request in requests}, [row for request in requests for row in request.grades]
    rollouts = _lock_rollouts(database, names)
    if len(names) < len(requests) or names != rollouts.keys() or any(each.ended is not None for each in rollouts.values()):
        return False
    if any(request.only_grades and rollouts[request.rollout_id].graded for request in requests):
        return False
    if not insert_rows(database, "grades", [(grade.key, grade.row) for grade in grades]):
        return False
    _store_ends(database, requests, rollouts, graded=[grade.key[0] for grade in grades])
    return True


END = BatchOperation("end", end, end_all, result=True, last=True)


def _lock_rollouts(database: PoolDatabase, names: Collection[str]) -> dict[str, _LockedRollout]:
    """Lock rollouts and their groups, so that no other transaction ends a rollout of the same groups meanwhile."""
    graded = "CASE WHEN EXISTS (SELECT 1 FROM grades WHERE rollout_id = r.id) THEN 1 ELSE 0 END"
    columns = ("r.id", "r.ended", "r.channel", "r.group_id", "g.min_size", graded)
    chosen = f"FROM rollouts AS r JOIN groups AS g ON g.id = r.group_id WHERE r.id IN ({placeholders(names)})"
    found = database.select(columns, f"{chosen} ORDER BY r.id{database.LOCK}", sorted(names))
    return {name: _LockedRollout(*columns) for name, *columns in found}


def _store_ends(
    database: PoolDatabase, requests: Sequence[EndRequest], rollouts: Mapping[str, _LockedRollout], *, graded: Sequence[str]
) -> None:
    """Write the ends of running rollouts. `graded` names a rollout once for each of its new grades."""
    parts = _count_parts(database, rollouts.keys(), PartCounts._fields)
    ended = [(name, *end, rollout_checksum(name, end, PartCounts(**parts[name]))) for name, end, *_ in requests]
    database.execute(
        f"""WITH new (name, new_end, new_message, checksum) AS (VALUES {row_placeholders(4, len(ended))})
            UPDATE rollouts SET ended = new_end, message = new_message, seal = checksum FROM new WHERE id = name""",
        [value for row in ended for value in row],
    )
    counts = defaultdict[str, list[CounterChange]](list)
    for name, end, *_ in requests:
        counts[rollouts[name].channel].append(CounterChange("end", str(end.end), 1))
    for channel, state in _close_groups(database, {rollout.group_id: rollout for rollout in rollouts.values()}):
        counts[channel] += [CounterChange("state", GroupState.OPEN, -1), CounterChange("state", state, 1)]
    for channel, changes in counts.items():
        database.add_counts(channel, changes)
    log: list[tuple[ChangeKind, str]] = [*(("graded", name) for name in graded), *(("ended", each.rollout_id) for each in requests)]
    for part in chunks(log):
        database.log_changes([(kind, rollouts[name].channel, name) for kind, name in part])


def _close_groups(database: PoolDatabase, groups: Mapping[str, _LockedRollout]) -> list[tuple[str, GroupState]]:
    """Close those groups, each given by one of its rollouts, in which none runs. Returns their channels and new states."""
    query = f"""SELECT group_id, min(oldest), sum(CASE ended WHEN ? THEN 1 ELSE 0 END) FROM rollouts
                WHERE group_id IN ({placeholders(groups)}) AND current = 1 GROUP BY group_id HAVING count(*) = count(ended)"""
    closed: list[tuple[str, GroupState]] = []
    rows: list[tuple[str, GroupState, int | None]] = []
    for group_id, oldest, completed in database.execute(query, (End.COMPLETED, *groups)).fetchall():
        state = GroupState.SHORT if completed < groups[group_id].min_size else GroupState.COMPLETE
        rows.append((group_id, state, oldest))
        closed.append((groups[group_id].channel, state))
    if rows:
        database.execute(
            f"""WITH new (name, new_state, lowest) AS (VALUES {row_placeholders(3, len(rows))})
                UPDATE groups SET state = new_state, oldest = CAST(lowest AS BIGINT) FROM new WHERE id = name""",
            [value for row in rows for value in row],
        )
    return closed


def _update_checksum(database: PoolDatabase, rollout_id: str) -> None:
    """Recount the rollout's grades and marks, and its steps and nodes once it has ended and no more can come."""
    end = StoredEnd(*database.execute("SELECT ended, message FROM rollouts WHERE id = ?", (rollout_id,)).fetchone())
    tables = ("grades", "marks") if end.end is None else PartCounts._fields
    counts = _count_parts(database, [rollout_id], tables)[rollout_id]
    checksum = rollout_checksum(rollout_id, end, PartCounts(*(counts.get(table, -1) for table in PartCounts._fields)))
    database.execute("UPDATE rollouts SET seal = ? WHERE id = ?", (checksum, rollout_id))


def _count_parts(database: PoolDatabase, names: Collection[str], tables: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the number of rows by rollout and table."""
    counts = [f"(SELECT count(*) FROM {table} WHERE rollout_id = r.id)" for table in tables]
    found = database.select(("r.id", *counts), f"FROM rollouts AS r WHERE r.id IN ({placeholders(names)})", list(names))
    return {name: dict(zip(tables, numbers, strict=True)) for name, *numbers in found}


class GroupRows(NamedTuple):
    """A group and its first rollouts, encoded."""

    id: str
    channel: str
    task: RecordRow
    rollouts: list[tuple[RolloutRef, RecordRow]]


def encode_group(task: Task, rollouts: Sequence[RolloutRef]) -> GroupRows:
    group_id = rules.check_group(task, rollouts)
    rows = [(rollout, encode_row(rollout, f"rollout {rollout.id!r}")) for rollout in rollouts]
    return GroupRows(group_id, rollouts[0].channel, encode_row(task, f"task {task.id!r}"), rows)


def open_group(database: PoolDatabase, group: GroupRows, seq: int | None, min_size: int, limit: GroupLimit | None) -> None:
    # a number after the highest, or a limit, depends on all groups of the channel
    database.lock(f"channel {group.channel}" if seq is None or limit else f"group {group.id}")
    if database.execute("SELECT 1 FROM groups WHERE id = ?", (group.id,)).fetchone():
        return
    _make_room(database, group.channel, limit)
    number = seq
    if number is None:
        (number,) = database.execute("SELECT coalesce(max(seq), -1) + 1 FROM groups WHERE channel = ?", (group.channel,)).fetchone()
    checksum = group_checksum(GroupHeader(group.id, group.channel, int(number), min_size), len(group.rollouts))
    database.execute(
        "INSERT INTO groups (id, channel, seq, state, record, crc, min_size, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (group.id, group.channel, number, GroupState.OPEN, group.task.record, group.task.crc, min_size, checksum),
    )
    for part in chunks(group.rollouts):
        _open_rollouts(database, part)
    database.add_counts(group.channel, [CounterChange("state", GroupState.OPEN, 1), CounterChange("top", "seq", int(number))])
    database.log_changes([("opened", group.channel, group.id)])


def _make_room(database: PoolDatabase, channel: str, limit: GroupLimit | None) -> None:
    """If the limit is reached, drop the oldest complete group or raise PoolFull."""
    if limit is None:
        return
    query = (
        f"SELECT coalesce(sum(n), 0) FROM tally WHERE channel = ? AND kind = 'state' AND name IN ({placeholders(rules.WAITING)})"
    )
    (waiting,) = database.execute(query, (channel, *rules.WAITING)).fetchone()
    if waiting < limit.groups:
        return
    query = f"SELECT id FROM groups WHERE channel = ? AND state = ? ORDER BY seq, id LIMIT 1{database.SKIP}"
    oldest = database.execute(query, (channel, GroupState.COMPLETE)).fetchone()
    if limit.overflow == "refuse" or oldest is None:
        raise rules.pool_full(channel, limit)
    _drop(database, oldest[0], channel, GroupState.COMPLETE, rules.OVERFLOW)


def drop(database: PoolDatabase, group_id: str, reason: str) -> bool:
    found = database.execute(f"SELECT state, channel FROM groups WHERE id = ?{database.LOCK}", (group_id,)).fetchone()
    if found is None:
        raise rules.unknown_group(group_id)
    state, channel = GroupState(found[0]), found[1]
    if not rules.check_droppable(group_id, state):
        return False
    _drop(database, group_id, channel, state, reason)
    return True


def _drop(database: PoolDatabase, group_id: str, channel: str, state: GroupState, reason: str) -> None:
    database.execute("UPDATE groups SET state = ? WHERE id = ?", (GroupState.DROPPED, group_id))
    count_move(database, channel, state, GroupState.DROPPED)
    database.add_counts(channel, [CounterChange("drop", reason, 1)])
    database.log_changes([("dropped", channel, group_id)])


def replace(database: PoolDatabase, lost: RolloutRef, reason: str, *, row: RecordRow, successor_row: RecordRow) -> None:
    stored = database.execute(f"SELECT record, ended FROM rollouts WHERE id = ?{database.LOCK}", (lost.id,)).fetchone()
    if stored is None:
        raise rules.unknown_rollout(lost.id)
    if stored[0] != row.record:
        raise rules.conflict(f"rollout {lost.id!r}")
    if database.execute("SELECT 1 FROM rollouts WHERE id = ?", (lost.successor.id,)).fetchone():
        return
    query = f"SELECT state, lease_id FROM groups WHERE id = ?{database.LOCK}"
    state, lease_id = database.execute(query, (lost.group_id,)).fetchone()
    rules.check_replaceable(lost, End(stored[1]) if stored[1] else None, GroupState(state), was_leased=lease_id is not None)
    database.execute("UPDATE rollouts SET current = 0 WHERE id = ?", (lost.id,))
    _open_rollouts(database, [(lost.successor, successor_row)])
    end(database, encode_end(lost.id, End.LOST, reason, ()))
    if state != GroupState.OPEN:
        database.execute("UPDATE groups SET state = ? WHERE id = ?", (GroupState.OPEN, lost.group_id))
        count_move(database, lost.channel, state, GroupState.OPEN)


def _open_rollouts(database: PoolDatabase, rollouts: Sequence[tuple[RolloutRef, RecordRow]]) -> None:
    names = [rollout.id for rollout, _ in rollouts]
    if known := database.execute(
        f"SELECT id FROM rollouts WHERE id IN ({placeholders(names)}) ORDER BY id LIMIT 1", names
    ).fetchone():
        raise rules.rollout_taken(known[0])
    rows = [(r.id, r.group_id, r.place, r.channel, 1, b"", row.record, row.crc) for r, row in rollouts]
    columns = "id, group_id, place, channel, current, message, record, crc"
    database.execute(
        f"INSERT INTO rollouts ({columns}) VALUES {row_placeholders(8, len(rows))}",
        [value for row in rows for value in row],
    )
    database.add_counts(rollouts[0][0].channel, [CounterChange("count", "rollouts", len(rows))])
