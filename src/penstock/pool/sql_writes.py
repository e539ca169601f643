"""What is written of groups, in SQL: each function is one atomic change and may refuse it with PoolError."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.pool import rules, seals, sql_ends
from penstock.pool.base import Bound
from penstock.pool.database import Database, Tally
from penstock.pool.rows import Row, seal
from penstock.pool.rules import State
from penstock.pool.seals import Opened
from penstock.pool.sql_rows import count_move, marks, portions, tuples
from penstock.records import End, Rollout, Task


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
    for part in portions(group.rollouts):
        _open_rollouts(database, part)
    database.count(group.channel, [Tally("state", State.OPEN, 1), Tally("top", "seq", int(number))])
    database.tell([("opened", group.channel, group.id)])


def _make_room(database: Database, channel: str, bound: Bound | None) -> None:
    """Refuse one group more, or drop the oldest complete one for it."""
    if bound is None:
        return
    query = f"SELECT coalesce(sum(n), 0) FROM tally WHERE channel = ? AND kind = 'state' AND name IN ({marks(rules.WAITING)})"
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
    _open_rollouts(database, [(lost.successor, successor_row)])
    sql_ends.end(database, sql_ends.seal_end(lost.id, End.LOST, reason, ()))
    if state != State.OPEN:
        database.execute("UPDATE groups SET state = ? WHERE id = ?", (State.OPEN, lost.group_id))
        count_move(database, lost.channel, state, State.OPEN)


def _open_rollouts(database: Database, given: Sequence[tuple[Rollout, Row]]) -> None:
    """Open rollouts of one channel."""
    names = [rollout.id for rollout, _ in given]
    if known := database.execute(f"SELECT id FROM rollouts WHERE id IN ({marks(names)}) ORDER BY id LIMIT 1", names).fetchone():
        raise rules.taken(known[0])
    rows = [(r.id, r.group_id, r.place, r.channel, 1, b"", row.record, row.crc) for r, row in given]
    database.execute(
        f"INSERT INTO rollouts (id, group_id, place, channel, current, message, record, crc) VALUES {tuples(8, len(rows))}",
        [value for row in rows for value in row],
    )
    database.count(given[0][0].channel, [Tally("count", "rollouts", len(rows))])
