"""What is read of a pool, in SQL."""

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.pool import rows, rules
from penstock.pool.base import Change, PoolStats
from penstock.pool.rows import AttemptRows, Ending, Opened, Parts, Row, build_attempt, column_names, unseal
from penstock.pool.rules import State, add_up
from penstock.pool.sql.database import Cursor, Database
from penstock.records import Attempt, Grade, Group, Mark, Node, Rollout, Step, Task

_NODES = f"SELECT {', '.join(column_names(Node))} FROM nodes WHERE rollout_id = ? AND id >= ? ORDER BY id"
_STEPS = f"SELECT {', '.join(column_names(Step))} FROM steps WHERE rollout_id = ? AND id >= ? ORDER BY id"
_GRADES = f"SELECT {', '.join(column_names(Grade))} FROM grades WHERE rollout_id = ? ORDER BY position"
_MARKS = f"SELECT {', '.join(column_names(Mark))} FROM marks WHERE rollout_id = ? ORDER BY id"
_ROLLOUT = """SELECT record, crc, ended, message, seal,
    EXISTS (SELECT 1 FROM nodes WHERE rollout_id = r.id AND id >= ?),
    EXISTS (SELECT 1 FROM steps WHERE rollout_id = r.id AND id >= ?),
    EXISTS (SELECT 1 FROM grades WHERE rollout_id = r.id),
    EXISTS (SELECT 1 FROM marks WHERE rollout_id = r.id)
    FROM rollouts AS r WHERE id = ?"""
"""With whether there is anything to read in each of the tables: the interpreter's lock is waited for with each statement."""
_GROUP = "SELECT id, seq, channel, min_size, seal, record, crc FROM groups"


def read_attempt(database: Database, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Attempt:
    """Everything recorded of one rollout, from a step and a node on."""
    found = database.execute(_ROLLOUT, (first_node, first_step, rollout_id)).fetchone()
    if found is None:
        raise rules.unknown_rollout(rollout_id)
    record, crc, ended, message, seal, *there = found
    numbered = ((_NODES, (rollout_id, first_node)), (_STEPS, (rollout_id, first_step)))
    wanted = zip((*numbered, (_GRADES, (rollout_id,)), (_MARKS, (rollout_id,))), there, strict=True)
    nodes, steps, grades, marks = (_rows(database.execute(*query)) if some else iter(()) for query, some in wanted)
    attempt = build_attempt(rollout_id, AttemptRows(Row(record, (), crc), Ending(ended, message), nodes, steps, grades, marks))
    whole = not first_step and not first_node
    rows.check_rollout(rollout_id, Ending(ended, message), seal, _parts(attempt) if whole else None)
    rows.check_attempt(rollout_id, attempt)
    if whole:
        rows.check_graph(rollout_id, attempt)
    return attempt


def read_task(database: Database, rollout_id: str) -> Task:
    """The task of a rollout's group."""
    query = "SELECT r.record, r.crc, g.record, g.crc FROM rollouts AS r JOIN groups AS g ON g.id = r.group_id WHERE r.id = ?"
    found = database.execute(query, (rollout_id,)).fetchone()
    if found is None:
        raise rules.unknown_rollout(rollout_id)
    rollout = unseal(Rollout, Row(found[0], (), found[1]), f"the record of rollout {rollout_id!r}")
    task = unseal(Task, Row(found[2], (), found[3]), f"the task of rollout {rollout_id!r}")
    if (rollout.id, rollout.task_id) != (rollout_id, task.id):
        raise rows.damaged(f"rollout {rollout_id!r}", "it leads to another one's record or task")
    return task


def read_groups(database: Database, group_ids: Iterable[str]) -> list[Group]:
    """These groups, in this order."""
    groups: list[Group] = []
    for group_id in group_ids:
        row = database.execute(f"{_GROUP} WHERE id = ?", (group_id,)).fetchone()
        if row is None:
            raise rows.damaged(f"group {group_id!r}", "it is not found under its id")
        groups.append(_build_group(database, row))
    return groups


def list_groups(database: Database, channel: str, *, first_seq: int, limit: int) -> list[Group]:
    """Groups of a channel by number."""
    query = f"{_GROUP} WHERE channel = ? AND seq >= ? ORDER BY seq, id LIMIT ?"
    return [_build_group(database, row) for row in database.execute(query, (channel, first_seq, max(limit, 0))).fetchall()]


def list_rollouts(database: Database, group_id: str) -> list[Rollout]:
    """All attempts of a group, replaced ones included."""
    stored = database.execute("SELECT id, record, crc FROM rollouts WHERE group_id = ?", (group_id,)).fetchall()
    found = [unseal(Rollout, Row(record, (), crc), f"the record of rollout {name!r}") for name, record, crc in stored]
    if any(rollout.group_id != group_id for rollout in found):
        raise rows.damaged(f"group {group_id!r}", "it leads to another one's rollouts")
    return sorted(found, key=lambda rollout: (rollout.place, rollout.attempt))


def list_channels(database: Database) -> list[str]:
    """All channels with a group."""
    return sorted(row[0] for row in database.execute("SELECT DISTINCT channel FROM tally WHERE kind = 'state'"))


def list_unfinished(database: Database, channel: str) -> list[Group]:
    """Groups of a channel with a place that has not ended."""
    query = f"{_GROUP} WHERE channel = ? AND state IN (?, ?) ORDER BY seq, id"
    return [_build_group(database, row) for row in database.execute(query, (channel, State.OPEN, State.SHORT)).fetchall()]


def read_ledger(database: Database) -> list[tuple[str, int]]:
    """Trained groups with their versions."""
    lines = database.execute("SELECT group_id, lease_id, version, seal FROM ledger ORDER BY position").fetchall()
    (trained,) = database.execute("SELECT sum(n) FROM tally WHERE kind = 'state' AND name = ?", (State.TRAINED,)).fetchone()
    rows.check_ledger(lines, int(trained or 0))
    return [(group_id, version) for group_id, _, version, _ in lines]


def read_changes(database: Database, after: int, limit: int) -> list[Change]:
    """What happened after a position."""
    query = f"SELECT position, kind, channel, id FROM changes WHERE position > ? AND {database.SETTLED} ORDER BY position LIMIT ?"
    return [Change(*row) for row in database.execute(query, (after, max(limit, 0)))]


def read_position(database: Database) -> int:
    """Of the last change."""
    query = f"SELECT position FROM changes WHERE {database.SETTLED} ORDER BY position DESC LIMIT 1"
    row = database.execute(query).fetchone()
    return row[0] if row else 0


def read_stats(database: Database, channel: str | None) -> PoolStats:
    """The running counts of one channel, or of all together."""
    value = "CASE kind WHEN 'top' THEN max(n) ELSE sum(n) END"
    query = f"SELECT kind, name, {value} FROM tally WHERE CAST(? AS TEXT) IS NULL OR channel = ? GROUP BY kind, name"
    return add_up((kind, name, int(n)) for kind, name, n in database.execute(query, (channel, channel)))


def _build_group(database: Database, row: tuple[Any, ...]) -> Group:
    group_id, seq, channel, min_size, seal, task, crc = row
    query = "SELECT id FROM rollouts WHERE group_id = ? AND current = 1 ORDER BY place"
    attempts = tuple(read_attempt(database, found[0]) for found in database.execute(query, (group_id,)).fetchall())
    asked = unseal(Task, Row(task, (), crc), f"the task of group {group_id!r}")
    rows.check_group(Opened(group_id, channel, seq, min_size), seal, asked, [attempt.rollout for attempt in attempts])
    return Group(id=group_id, seq=seq, task=asked, channel=channel, attempts=attempts)


def _parts(attempt: Attempt) -> Parts:
    return Parts(len(attempt.nodes), len(attempt.steps), len(attempt.grades), len(attempt.marks))


def _rows(cursor: Cursor) -> Iterator[Row]:
    for record, *columns, crc in cursor:
        yield Row(record, tuple(columns), crc)
