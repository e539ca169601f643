"""What is read of a pool, in SQL."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.pool import rules
from penstock.pool.base import Change, PoolStats
from penstock.pool.database import Cursor, Database
from penstock.pool.rows import AttemptRows, Ending, Row, build_attempt, column_names, unseal
from penstock.pool.rules import State
from penstock.records import Attempt, Grade, Group, Mark, Node, Rollout, Step, Task

_NODES = f"SELECT {', '.join(column_names(Node))} FROM nodes WHERE rollout_id = ? AND id >= ? ORDER BY id"
_STEPS = f"SELECT {', '.join(column_names(Step))} FROM steps WHERE rollout_id = ? AND id >= ? ORDER BY id"
_GRADES = f"SELECT {', '.join(column_names(Grade))} FROM grades WHERE rollout_id = ? ORDER BY position"
_MARKS = f"SELECT {', '.join(column_names(Mark))} FROM marks WHERE rollout_id = ? ORDER BY id"
_GROUP = "SELECT id, seq, channel, record, crc FROM groups"


def read_attempt(database: Database, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Attempt:
    """Everything recorded of one rollout, from a step and a node on."""
    found = database.execute("SELECT record, crc, ended, message FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
    if found is None:
        raise rules.unknown_rollout(rollout_id)
    record, crc, ended, message = found
    numbered = ((_NODES, (rollout_id, first_node)), (_STEPS, (rollout_id, first_step)))
    wanted = (*numbered, (_GRADES, (rollout_id,)), (_MARKS, (rollout_id,)))
    nodes, steps, grades, marks = (_rows(database.execute(query, values)) for query, values in wanted)
    return build_attempt(rollout_id, AttemptRows(Row(record, (), crc), Ending(ended, message), nodes, steps, grades, marks))


def read_task(database: Database, rollout_id: str) -> Task:
    """The task of a rollout's group."""
    query = "SELECT record, crc FROM groups WHERE id = (SELECT group_id FROM rollouts WHERE id = ?)"
    found = database.execute(query, (rollout_id,)).fetchone()
    if found is None:
        raise rules.unknown_rollout(rollout_id)
    record, crc = found
    return unseal(Task, Row(record, (), crc), f"the task of rollout {rollout_id!r}")


def read_groups(database: Database, group_ids: Iterable[str]) -> list[Group]:
    """These groups, in this order."""
    return [_build_group(database, database.execute(f"{_GROUP} WHERE id = ?", (group_id,)).fetchone()) for group_id in group_ids]


def list_groups(database: Database, channel: str, *, first_seq: int, limit: int) -> list[Group]:
    """Groups of a channel by number."""
    query = f"{_GROUP} WHERE channel = ? AND seq >= ? ORDER BY seq, id LIMIT ?"
    return [_build_group(database, row) for row in database.execute(query, (channel, first_seq, max(limit, 0))).fetchall()]


def list_rollouts(database: Database, group_id: str) -> list[Rollout]:
    """All attempts of a group, replaced ones included."""
    rows = database.execute("SELECT id, record, crc FROM rollouts WHERE group_id = ?", (group_id,)).fetchall()
    found = [unseal(Rollout, Row(record, (), crc), f"the record of rollout {name!r}") for name, record, crc in rows]
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
    return database.execute("SELECT group_id, version FROM ledger ORDER BY position").fetchall()


def read_changes(database: Database, after: int, limit: int) -> list[Change]:
    """What happened after a position."""
    query = f"SELECT position, kind, channel, id FROM changes WHERE position > ? AND {database.SETTLED} ORDER BY position LIMIT ?"
    return [Change(*row) for row in database.execute(query, (after, max(limit, 0)))]


def read_stats(database: Database, channel: str | None) -> PoolStats:
    """The running counts of one channel, or of all together."""
    query = "SELECT kind, name, sum(n), max(n) FROM tally WHERE CAST(? AS TEXT) IS NULL OR channel = ? GROUP BY kind, name"
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for kind, name, total, highest in database.execute(query, (channel, channel)):
        counts[kind][name] = highest if kind == "top" else int(total)
    state, plain, top = counts["state"], counts["count"], counts["top"]
    groups = sum(state.values())
    return PoolStats(
        groups=groups,
        groups_complete=groups - state.get(State.OPEN, 0),
        groups_leased=state.get(State.LEASED, 0),
        groups_trained=state.get(State.TRAINED, 0),
        groups_stale=state.get(State.STALE, 0),
        groups_short=state.get(State.SHORT, 0),
        groups_dropped=state.get(State.DROPPED, 0),
        rollouts=plain.get("rollouts", 0),
        steps=plain.get("steps", 0),
        tokens=plain.get("tokens", 0),
        prompt_tokens=plain.get("prompt_tokens", 0),
        ends=counts["end"],
        drops=counts["drop"],
        breaks=counts["break"],
        last_seq=top.get("seq", -1),
        last_version=max(top.get("version", 0), 0),
    )


def _build_group(database: Database, row: tuple[Any, ...]) -> Group:
    group_id, seq, channel, task, crc = row
    query = "SELECT id FROM rollouts WHERE group_id = ? AND current = 1 ORDER BY place"
    attempts = tuple(read_attempt(database, found[0]) for found in database.execute(query, (group_id,)).fetchall())
    asked = unseal(Task, Row(task, (), crc), f"the task of group {group_id!r}")
    return Group(id=group_id, seq=seq, task=asked, channel=channel, attempts=attempts)


def _rows(cursor: Cursor) -> Iterator[Row]:
    for record, *columns, crc in cursor:
        yield Row(record, tuple(columns), crc)
