"""What is written of rollouts, in SQL: each function is one atomic change and may refuse it with PoolError."""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

from penstock.pool import rules, seals
from penstock.pool.base import Bound
from penstock.pool.database import Database, Tally
from penstock.pool.rows import Ending, Row, column_names, grade_key, mark_key, pack_message, seal
from penstock.pool.rules import State
from penstock.pool.seals import Opened, Parts
from penstock.records import End, Grade, Mark, Node, Rollout, Step, Task


def _insert(table: str, kind: type[Any]) -> str:
    names = ["rollout_id", "id", *column_names(kind)]
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' for _ in names)}) ON CONFLICT DO NOTHING"


_TABLES: dict[str, type[Any]] = {"nodes": Node, "steps": Step, "grades": Grade}
_INSERTS = {table: _insert(table, kind) for table, kind in _TABLES.items()}
_READS = {
    table: f"SELECT {', '.join(column_names(kind))} FROM {table} WHERE rollout_id = ? AND id = ?" for table, kind in _TABLES.items()
}


def count_move(database: Database, channel: str, before: str, after: str, n: int = 1) -> None:
    """Count `n` groups that went from one state to another."""
    database.count(channel, [Tally("state", str(before), -n), Tally("state", str(after), n)])


class GroupRows(NamedTuple):
    """A group and its first rollouts, sealed."""

    id: str
    channel: str
    task: Row
    rollouts: list[tuple[Rollout, Row]]


def seal_group(task: Task, rollouts: Sequence[Rollout]) -> GroupRows:
    """Check and write down what `open_group` stores."""
    group_id = rules.check_group(task, rollouts)
    rows = [(rollout, seal(rollout, f"rollout {rollout.id!r}")) for rollout in rollouts]
    return GroupRows(group_id, rollouts[0].channel, seal(task, f"task {task.id!r}"), rows)


def open_group(database: Database, group: GroupRows, seq: int | None, min_size: int, bound: Bound | None) -> None:
    """Make the group unless it is there."""
    database.alone(f"channel {group.channel}" if seq is None or bound else f"group {group.id}")
    if database.execute("SELECT 1 FROM groups WHERE id = ?", (group.id,)).fetchone():
        return
    _make_room(database, group.channel, bound)
    number = seq
    if number is None:
        (number,) = database.execute("SELECT coalesce(max(seq), -1) + 1 FROM groups WHERE channel = ?", (group.channel,)).fetchone()
    sealed = seals.seal_group(Opened(group.id, group.channel, int(number), min_size), len(group.rollouts))
    database.execute(
        "INSERT INTO groups (id, channel, seq, state, record, crc, min_size, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (group.id, group.channel, number, State.OPEN, group.task.record, group.task.crc, min_size, sealed),
    )
    for rollout, row in group.rollouts:
        _open_rollout(database, rollout, row)
    database.count(group.channel, [Tally("state", State.OPEN, 1), Tally("top", "seq", int(number))])
    database.tell([("opened", group.channel, group.id)])


def _make_room(database: Database, channel: str, bound: Bound | None) -> None:
    """Refuse one group more, or drop the oldest complete one for it."""
    if bound is None:
        return
    query = f"SELECT count(*) FROM groups WHERE channel = ? AND state IN ({_marks(rules.WAITING)})"
    (waiting,) = database.execute(query, (channel, *rules.WAITING)).fetchone()
    if waiting < bound.groups:
        return
    query = f"SELECT id FROM groups WHERE channel = ? AND state = ? ORDER BY seq, id LIMIT 1{database.SKIP}"
    oldest = database.execute(query, (channel, State.COMPLETE)).fetchone()
    if bound.overflow == "refuse" or oldest is None:
        raise rules.full(channel, bound)
    _drop(database, oldest[0], channel, State.COMPLETE, rules.OVERFLOW)


def drop(database: Database, group_id: str, reason: str) -> bool:
    """Take the group out of training."""
    found = database.execute(f"SELECT state, channel FROM groups WHERE id = ?{database.LOCK}", (group_id,)).fetchone()
    if found is None:
        raise rules.unknown_group(group_id)
    state, channel = State(found[0]), found[1]
    if not rules.check_droppable(group_id, state):
        return False
    _drop(database, group_id, channel, state, reason)
    return True


def _drop(database: Database, group_id: str, channel: str, state: State, reason: str) -> None:
    database.execute("UPDATE groups SET state = ? WHERE id = ?", (State.DROPPED, group_id))
    count_move(database, channel, state, State.DROPPED)
    database.count(channel, [Tally("drop", reason, 1)])
    database.tell([("dropped", channel, group_id)])


class Append(NamedTuple):
    """A step and the node that it added, sealed."""

    step: Step
    node: Node | None
    row: Row
    node_row: Row | None


def seal_append(step: Step, node: Node | None) -> Append:
    """Check and write down what `append` stores."""
    rules.check_step(step, node)
    return Append(step, node, seal(step, rules.step_name(step)), node and seal(node, rules.node_name(node)))


def append(database: Database, given: Append) -> None:
    """Store a step and its node."""
    step, node, row, node_row = given
    channel, oldest = _running(database, step.rollout_id, rules.step_name(step))
    added = None
    if node is None or node_row is None:
        if not _has(database, "nodes", step.rollout_id, step.node):
            raise rules.missing_node(step)
    elif _put(database, "nodes", (step.rollout_id, node.id), node_row, rules.node_name(node)):
        if node.parent is not None and not _has(database, "steps", node.rollout_id, node.parent):
            raise rules.missing_parent(node)
        added = node
    if not _put(database, "steps", (step.rollout_id, step.index), row, rules.step_name(step)):
        return
    _lower(database, step.rollout_id, oldest, step.versions)
    database.count(channel, _tallies([step], [added] if added else []))


def append_all(database: Database, given: Sequence[Append]) -> bool:
    """Store several at once, in few statements; False where one of them is not plainly new, whatever was written till then.

    Each statement lets other threads in and has to wait for its turn again, so fewer statements cost more than their number saves.
    """
    rollouts = {each.step.rollout_id for each in given}
    chosen = f"FROM rollouts WHERE id IN ({_marks(rollouts)}) ORDER BY id{database.LOCK}"
    found = database.rows(("id", "ended", "channel", "oldest"), chosen, sorted(rollouts))
    running = {name: _Running(channel, oldest) for name, ended, channel, oldest in found if ended is None}
    nodes = [(each.node, each.node_row) for each in given if each.node is not None and each.node_row is not None]
    if len(running) < len(rollouts):
        return False
    stored = _put_all(database, "nodes", [((node.rollout_id, node.id), row) for node, row in nodes])
    stored = stored and _put_all(database, "steps", [((each.step.rollout_id, each.step.index), each.row) for each in given])
    parents = {(node.rollout_id, node.parent) for node, _ in nodes if node.parent is not None}
    if not stored or not _have_all(database, "steps", parents):
        return False
    if not _have_all(database, "nodes", {(each.step.rollout_id, each.step.node) for each in given if each.node is None}):
        return False
    lowered: dict[str, int | None] = {}
    for step, _, _, _ in given:
        channel, oldest = running[step.rollout_id]
        lowest = rules.oldest_version((oldest, min(step.versions, default=None)))
        if lowest != oldest:
            running[step.rollout_id] = _Running(channel, lowest)
            lowered[step.rollout_id] = lowest
    for lowest in set(lowered.values()):
        names = [name for name, value in lowered.items() if value == lowest]
        database.execute(f"UPDATE rollouts SET oldest = ? WHERE id IN ({_marks(names)})", (lowest, *names))
    for channel in {each.channel for each in running.values()}:
        mine = [each for each in given if running[each.step.rollout_id].channel == channel]
        database.count(channel, _tallies([each.step for each in mine], [each.node for each in mine if each.node is not None]))
    return True


def _tallies(steps: Sequence[Step], nodes: Sequence[Node]) -> list[Tally]:
    """What these add to the running counts of their channel."""
    return [
        Tally("count", "steps", len(steps)),
        Tally("count", "tokens", sum(len(step.completion_ids) for step in steps)),
        Tally("top", "version", max(max(step.versions, default=0) for step in steps)),
        *([Tally("count", "prompt_tokens", sum(len(node.token_ids) for node in nodes))] if nodes else []),
        *(Tally("break", reason, n) for reason, n in Counter(node.reason for node in nodes if node.reason is not None).items()),
    ]


def _lower(database: Database, rollout_id: str, oldest: int | None, versions: Sequence[int]) -> None:
    """Keep the oldest version on any token of the rollout."""
    lowest = rules.oldest_version((oldest, min(versions, default=None)))
    if lowest != oldest:
        database.execute("UPDATE rollouts SET oldest = ? WHERE id = ?", (lowest, rollout_id))


def _put_all(database: Database, table: str, rows: list[tuple[tuple[str, Any], Row]]) -> bool:
    """Insert rows; False where one of them, whatever its content, was there."""
    if not rows:
        return True
    values = [value for key, row in rows for value in (*key, row.record, *row.columns, row.crc)]
    return database.execute(_insert_many(table, len(rows)), values).rowcount == len(rows)


@cache
def _insert_many(table: str, rows: int) -> str:
    head, _, one = _INSERTS[table].partition(" VALUES ")
    marks, _, conflict = one.partition(" ON ")
    return f"{head} VALUES {', '.join([marks] * rows)} ON {conflict}"


@cache
def _count_of(table: str, keys: int) -> str:
    """A join, as SQLite would look through the whole table for `(rollout_id, id) IN …`."""
    first, rest = "(CAST(? AS TEXT), CAST(? AS BIGINT))", ", (?, ?)" * (keys - 1)
    wanted = f"WITH wanted (rollout, number) AS (VALUES {first}{rest})"
    return f"{wanted} SELECT count(*) FROM wanted JOIN {table} ON rollout_id = rollout AND id = number"


def _have_all(database: Database, table: str, keys: set[tuple[str, int]]) -> bool:
    if not keys:
        return True
    fields = [field for key in keys for field in key]
    return database.execute(_count_of(table, len(keys)), fields).fetchone()[0] == len(keys)


def _marks(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values))


def grade(database: Database, given: Grade, row: Row) -> None:
    """Store a grade."""
    channel, _ = _running(database, given.rollout_id, rules.grade_name(given))
    if _put(database, "grades", (given.rollout_id, grade_key(given)), row, rules.grade_name(given)):
        _seal_rollout(database, given.rollout_id)
        database.tell([("graded", channel, given.rollout_id)])


def mark(database: Database, given: Mark, row: Row) -> bool:
    """Store a curator's word over an earlier one; whether a trainer can still see it."""
    database.execute(f"SELECT 1 FROM rollouts WHERE id = ?{database.LOCK}", (given.rollout_id,))
    query = "SELECT r.channel, g.state FROM rollouts AS r JOIN groups AS g ON g.id = r.group_id WHERE r.id = ?"
    found = database.execute(query, (given.rollout_id,)).fetchone()
    if found is None:
        raise rules.unknown_rollout(given.rollout_id)
    if given.step is not None and not _has(database, "steps", given.rollout_id, given.step):
        raise rules.missing_step(given)
    database.execute(
        """INSERT INTO marks (rollout_id, id, record, crc) VALUES (?, ?, ?, ?)
           ON CONFLICT (rollout_id, id) DO UPDATE SET record = excluded.record, crc = excluded.crc""",
        (given.rollout_id, mark_key(given), row.record, row.crc),
    )
    _seal_rollout(database, given.rollout_id)
    database.tell([("marked", found[0], given.rollout_id)])
    return State(found[1]) in rules.UNCLAIMED


def end(database: Database, rollout_id: str, how: End, message: str) -> bool:
    """Give the rollout its end, and with the last one its group its completeness."""
    query = f"SELECT ended, channel, group_id FROM rollouts WHERE id = ?{database.LOCK}"
    row = database.execute(query, (rollout_id,)).fetchone()
    if row is None:
        raise rules.unknown_rollout(rollout_id)
    ended, channel, group_id = row
    if ended is not None:
        return False
    found = database.execute(f"SELECT min_size FROM groups WHERE id = ?{database.LOCK}", (group_id,)).fetchone()
    database.execute("UPDATE rollouts SET ended = ?, message = ? WHERE id = ?", (how, pack_message(message), rollout_id))
    _seal_rollout(database, rollout_id)
    database.count(channel, [Tally("end", how, 1)])
    database.tell([("ended", channel, rollout_id)])
    places = database.execute("SELECT ended, oldest FROM rollouts WHERE group_id = ? AND current = 1", (group_id,)).fetchall()
    if all(place[0] is not None for place in places):
        oldest = rules.oldest_version(place[1] for place in places)
        state = State.SHORT if rules.is_short((place[0] for place in places), found[0]) else State.COMPLETE
        database.execute("UPDATE groups SET state = ?, oldest = ? WHERE id = ?", (state, oldest, group_id))
        count_move(database, channel, State.OPEN, state)
    return True


def _seal_rollout(database: Database, rollout_id: str) -> None:
    """Keep how many parts the rollout has; of its steps and nodes only once no more can come."""
    ending = Ending(*database.execute("SELECT ended, message FROM rollouts WHERE id = ?", (rollout_id,)).fetchone())
    tables = ("grades", "marks") if ending.end is None else Parts._fields
    counts = ", ".join(f"(SELECT count(*) FROM {table} WHERE rollout_id = ?)" for table in tables)
    found = dict(zip(tables, database.execute(f"SELECT {counts}", (rollout_id,) * len(tables)).fetchone(), strict=True))
    sealed = seals.seal_rollout(rollout_id, ending, Parts(*(found.get(table, -1) for table in Parts._fields)))
    database.execute("UPDATE rollouts SET seal = ? WHERE id = ?", (sealed, rollout_id))


def replace(database: Database, lost: Rollout, reason: str, *, row: Row, successor_row: Row) -> None:
    """End the one and open the other."""
    stored = database.execute(f"SELECT record, ended FROM rollouts WHERE id = ?{database.LOCK}", (lost.id,)).fetchone()
    if stored is None:
        raise rules.unknown_rollout(lost.id)
    if stored[0] != row.record:
        raise rules.differs(f"rollout {lost.id!r}")
    if database.execute("SELECT 1 FROM rollouts WHERE id = ?", (lost.successor.id,)).fetchone():
        return
    query = f"SELECT state, lease_id FROM groups WHERE id = ?{database.LOCK}"
    state, lease_id = database.execute(query, (lost.group_id,)).fetchone()
    rules.check_replaceable(lost, End(stored[1]) if stored[1] else None, State(state), lent=lease_id is not None)
    database.execute("UPDATE rollouts SET current = 0 WHERE id = ?", (lost.id,))
    _open_rollout(database, lost.successor, successor_row)
    end(database, lost.id, End.LOST, reason)
    if state != State.OPEN:
        database.execute("UPDATE groups SET state = ? WHERE id = ?", (State.OPEN, lost.group_id))
        count_move(database, lost.channel, state, State.OPEN)


def _open_rollout(database: Database, rollout: Rollout, row: Row) -> None:
    if database.execute("SELECT 1 FROM rollouts WHERE id = ?", (rollout.id,)).fetchone():
        raise rules.taken(rollout.id)
    database.execute(
        "INSERT INTO rollouts (id, group_id, place, channel, current, message, record, crc) VALUES (?, ?, ?, ?, 1, ?, ?, ?)",
        (rollout.id, rollout.group_id, rollout.place, rollout.channel, b"", row.record, row.crc),
    )
    database.count(rollout.channel, [Tally("count", "rollouts", 1)])


class _Running(NamedTuple):
    channel: str
    oldest: int | None


def _running(database: Database, rollout_id: str, name: str) -> _Running:
    """The rollout that `name` is to be written to, which must not have ended."""
    query = f"SELECT ended, channel, oldest FROM rollouts WHERE id = ?{database.LOCK}"
    row = database.execute(query, (rollout_id,)).fetchone()
    if row is None:
        raise rules.unknown_rollout(rollout_id)
    if row[0] is not None:
        raise rules.too_late(name, End(row[0]))
    return _Running(row[1], row[2])


def _has(database: Database, table: str, rollout_id: str, key: int) -> bool:
    return database.execute(f"SELECT 1 FROM {table} WHERE rollout_id = ? AND id = ?", (rollout_id, key)).fetchone() is not None


def _put(database: Database, table: str, key: tuple[str, Any], row: Row, name: str) -> bool:
    """Insert a row; False where the very same is there, PoolError where another is."""
    cursor = database.execute(_INSERTS[table], (*key, row.record, *row.columns, row.crc))
    if cursor.rowcount:
        return True
    if database.execute(_READS[table], key).fetchone() != (row.record, *row.columns, row.crc):
        raise rules.differs(name)
    return False
