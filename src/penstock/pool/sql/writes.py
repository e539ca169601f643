"""How the pools' SQL stores and finds single rows of a rollout."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from penstock.pool import rows, rules
from penstock.pool.base import Bound, Kind
from penstock.pool.rows import Ending, Opened, Parts, Row, column_names, grade_key, mark_key, pack_message, seal
from penstock.pool.rules import Span, State
from penstock.pool.sql.database import CounterRow, Database
from penstock.pool.writer import Bulk
from penstock.records import End, Grade, Mark, Node, Rollout, Step, Task

T = TypeVar("T")

MANY = 1000
"""SQLite takes 32,766 values to a statement, PostgreSQL twice as many."""


def _insert(table: str, kind: type[Any]) -> str:
    names = ["rollout_id", "id", *column_names(kind)]
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' for _ in names)}) ON CONFLICT DO NOTHING"


_TABLES: dict[str, type[Any]] = {"nodes": Node, "steps": Step, "grades": Grade}
_INSERTS = {table: _insert(table, kind) for table, kind in _TABLES.items()}
_READS = {
    table: f"SELECT {', '.join(column_names(kind))} FROM {table} WHERE rollout_id = ? AND id = ?" for table, kind in _TABLES.items()
}


class Running(NamedTuple):
    """What a write to a rollout needs to know of it."""

    channel: str
    oldest: int | None


def running(database: Database, rollout_id: str, name: str) -> Running:
    """The rollout that `name` is to be written to, which must not have ended."""
    query = f"SELECT ended, channel, oldest FROM rollouts WHERE id = ?{database.LOCK}"
    row = database.execute(query, (rollout_id,)).fetchone()
    if row is None:
        raise rules.unknown_rollout(rollout_id)
    if row[0] is not None:
        raise rules.too_late(name, End(row[0]))
    return Running(row[1], row[2])


def has(database: Database, table: str, rollout_id: str, key: int) -> bool:
    """Whether a step or node is stored."""
    return database.execute(f"SELECT 1 FROM {table} WHERE rollout_id = ? AND id = ?", (rollout_id, key)).fetchone() is not None


def put(database: Database, table: str, key: tuple[str, Any], row: Row, name: str) -> bool:
    """Insert a row; False where the very same is there, PoolError where another is."""
    cursor = database.execute(_INSERTS[table], (*key, row.record, *row.columns, row.crc))
    if cursor.rowcount:
        return True
    if database.execute(_READS[table], key).fetchone() != (row.record, *row.columns, row.crc):
        raise rules.differs(name)
    return False


def put_all(database: Database, table: str, rows: list[tuple[tuple[str, Any], Row]]) -> bool:
    """Insert rows; False where one of them, whatever its content, was there."""
    if not rows:
        return True
    values = [value for key, row in rows for value in (*key, row.record, *row.columns, row.crc)]
    return database.execute(_insert_many(table, len(rows)), values).rowcount == len(rows)


@cache
def _insert_many(table: str, rows: int) -> str:
    head, _, one = _INSERTS[table].partition(" VALUES ")
    values, _, conflict = one.partition(" ON ")
    return f"{head} VALUES {', '.join([values] * rows)} ON {conflict}"


@cache
def _count_of(table: str, keys: int) -> str:
    """A join, as SQLite would look through the whole table for `(rollout_id, id) IN …`."""
    first, rest = "(CAST(? AS TEXT), CAST(? AS BIGINT))", ", (?, ?)" * (keys - 1)
    wanted = f"WITH wanted (rollout, number) AS (VALUES {first}{rest})"
    return f"{wanted} SELECT count(*) FROM wanted JOIN {table} ON rollout_id = rollout AND id = number"


def have_all(database: Database, table: str, keys: set[tuple[str, int]]) -> bool:
    """Whether all these steps or nodes are stored."""
    if not keys:
        return True
    fields = [field for key in keys for field in key]
    return database.execute(_count_of(table, len(keys)), fields).fetchone()[0] == len(keys)


def marks(values: Collection[Any]) -> str:
    """A place for each value."""
    return ", ".join("?" * len(values))


def portions(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """The values in parts that a statement can carry, at up to ten places for each."""
    return (values[first : first + MANY] for first in range(0, len(values), MANY))


def tuples(width: int, rows: int) -> str:
    """Places for rows of so many values."""
    return ", ".join([f"({', '.join('?' * width)})"] * rows)


def count_move(database: Database, channel: str, before: str, after: str, n: int = 1) -> None:
    """Count `n` groups that went from one state to another."""
    database.count(channel, [CounterRow("state", str(before), -n), CounterRow("state", str(after), n)])


class Added(NamedTuple):
    """The node that a step added, sealed."""

    parent: int | None
    reason: str | None
    tokens: int
    row: Row


class Append(NamedTuple):
    """A step, sealed, in plain values: another process may be the one that writes it."""

    rollout_id: str
    step: int
    node: int
    added: Added | None
    """None where the node was there."""
    sampled: int
    versions: Span
    row: Row


def seal_append(step: Step, node: Node | None) -> Append:
    """Check and write down what `append` stores."""
    rules.check_step(step, node)
    row, added = seal(step, rules.step_name(step.rollout_id, step.index)), None
    if node is not None:
        added = Added(node.parent, node.reason, len(node.token_ids), seal(node, rules.node_name(node.rollout_id, node.id)))
    versions = rules.version_span(step.versions)
    return Append(step.rollout_id, step.index, step.node, added, len(step.completion_ids), versions, row)


def append(database: Database, given: Append) -> None:
    """Store a step and its node."""
    rollout_id, name = given.rollout_id, rules.step_name(given.rollout_id, given.step)
    channel, oldest = running(database, rollout_id, name)
    new = None
    if given.added is None:
        if not has(database, "nodes", rollout_id, given.node):
            raise rules.missing_node(rollout_id, given.step, given.node)
    elif put(database, "nodes", (rollout_id, given.node), given.added.row, rules.node_name(rollout_id, given.node)):
        new = given.added
        if new.parent is not None and not has(database, "steps", rollout_id, new.parent):
            raise rules.missing_parent(rollout_id, given.node, new.parent)
    if not put(database, "steps", (rollout_id, given.step), given.row, name):
        return
    lowest = rules.oldest_version((oldest, given.versions.oldest))
    if lowest != oldest:
        database.execute("UPDATE rollouts SET oldest = ? WHERE id = ?", (lowest, rollout_id))
    database.count(channel, _tallies([given], [new] if new else []))


def append_all(database: Database, given: Sequence[Append]) -> bool:
    """Store several at once, in few statements; False where one of them is not plainly new, whatever was written till then.

    Each statement lets other threads in and has to wait for its turn again, so fewer statements cost more than their number saves.
    """
    rollouts = {each.rollout_id for each in given}
    chosen = f"FROM rollouts WHERE id IN ({marks(rollouts)}) ORDER BY id{database.LOCK}"
    found = database.rows(("id", "ended", "channel", "oldest"), chosen, sorted(rollouts))
    open_ones = {name: Running(channel, oldest) for name, ended, channel, oldest in found if ended is None}
    nodes = [(each.rollout_id, each.node, each.added) for each in given if each.added is not None]
    if len(open_ones) < len(rollouts):
        return False
    stored = put_all(database, "nodes", [((rollout_id, node), added.row) for rollout_id, node, added in nodes])
    stored = stored and put_all(database, "steps", [((each.rollout_id, each.step), each.row) for each in given])
    parents = {(rollout_id, added.parent) for rollout_id, _, added in nodes if added.parent is not None}
    if not stored or not have_all(database, "steps", parents):
        return False
    if not have_all(database, "nodes", {(each.rollout_id, each.node) for each in given if each.added is None}):
        return False
    lowered: dict[str, int | None] = {}
    for each in given:
        channel, oldest = open_ones[each.rollout_id]
        lowest = rules.oldest_version((oldest, each.versions.oldest))
        if lowest != oldest:
            open_ones[each.rollout_id] = Running(channel, lowest)
            lowered[each.rollout_id] = lowest
    for lowest in set(lowered.values()):
        names = [name for name, value in lowered.items() if value == lowest]
        database.execute(f"UPDATE rollouts SET oldest = ? WHERE id IN ({marks(names)})", (lowest, *names))
    for channel in {each.channel for each in open_ones.values()}:
        mine = [each for each in given if open_ones[each.rollout_id].channel == channel]
        database.count(channel, _tallies(mine, [each.added for each in mine if each.added is not None]))
    return True


APPEND = Bulk("append", append, append_all)


def _tallies(given: Sequence[Append], added: Sequence[Added]) -> list[CounterRow]:
    """What these steps and new nodes add to the running counts of their channel."""
    return [
        CounterRow("count", "steps", len(given)),
        CounterRow("count", "tokens", sum(each.sampled for each in given)),
        CounterRow("top", "version", max(each.versions.newest for each in given)),
        *([CounterRow("count", "prompt_tokens", sum(each.tokens for each in added))] if added else []),
        *(
            CounterRow("break", reason, n)
            for reason, n in Counter(each.reason for each in added if each.reason is not None).items()
        ),
    ]


class GradeRow(NamedTuple):
    key: tuple[str, bytes]
    row: Row
    name: str


class Finish(NamedTuple):
    """An end and the grades that come with it, sealed."""

    rollout_id: str
    ending: Ending
    grades: list[GradeRow]


def seal_grade(given: Grade) -> GradeRow:
    """Check and write down what `grade` stores."""
    rules.check_grade(given)
    name = rules.grade_name(given)
    return GradeRow((given.rollout_id, grade_key(given)), seal(given, name), name)


def seal_end(rollout_id: str, how: End, message: str, grades: Sequence[Grade]) -> Finish:
    """Check and write down what `end` stores."""
    rules.check_grades(rollout_id, grades)
    return Finish(rollout_id, Ending(End(how).value, pack_message(message)), [seal_grade(each) for each in grades])


def grade(database: Database, given: GradeRow) -> None:
    rollout_id = given.key[0]
    channel, _ = running(database, rollout_id, given.name)
    if put(database, "grades", given.key, given.row, given.name):
        _seal_rollout(database, rollout_id)
        database.tell([("graded", channel, rollout_id)])


def mark(database: Database, given: Mark, row: Row) -> bool:
    """Store a curator's word over an earlier one; whether a trainer can still see it."""
    database.execute(f"SELECT 1 FROM rollouts WHERE id = ?{database.LOCK}", (given.rollout_id,))
    query = "SELECT r.channel, g.state FROM rollouts AS r JOIN groups AS g ON g.id = r.group_id WHERE r.id = ?"
    found = database.execute(query, (given.rollout_id,)).fetchone()
    if found is None:
        raise rules.unknown_rollout(given.rollout_id)
    if given.step is not None and not has(database, "steps", given.rollout_id, given.step):
        raise rules.missing_step(given)
    database.execute(
        """INSERT INTO marks (rollout_id, id, record, crc) VALUES (?, ?, ?, ?)
           ON CONFLICT (rollout_id, id) DO UPDATE SET record = excluded.record, crc = excluded.crc""",
        (given.rollout_id, mark_key(given), row.record, row.crc),
    )
    _seal_rollout(database, given.rollout_id)
    database.tell([("marked", found[0], given.rollout_id)])
    return State(found[1]) in rules.UNCLAIMED


class _Place(NamedTuple):
    """Where a rollout belongs."""

    ended: str | None
    channel: str
    group_id: str
    min_size: int


def end(database: Database, given: Finish) -> bool:
    """Give the rollout its grades and its end, and with the last one its group its completeness."""
    place = _places(database, {given.rollout_id}).get(given.rollout_id)
    if place is None:
        raise rules.unknown_rollout(given.rollout_id)
    if place.ended is not None:
        if given.grades:
            raise rules.too_late(given.grades[0].name, End(place.ended))
        return False
    new = [each for each in given.grades if put(database, "grades", each.key, each.row, each.name)]
    _finish(database, [given], {given.rollout_id: place}, graded=[given.rollout_id] * len(new))
    return True


def end_all(database: Database, given: Sequence[Finish]) -> bool:
    """Give several their ends, in few statements; False where one of them is not plainly new, whatever was written till then."""
    names, grades = {each.rollout_id for each in given}, [row for each in given for row in each.grades]
    places = _places(database, names)
    if len(names) < len(given) or names != places.keys() or any(place.ended is not None for place in places.values()):
        return False
    if not put_all(database, "grades", [(each.key, each.row) for each in grades]):
        return False
    _finish(database, given, places, graded=[each.key[0] for each in grades])
    return True


END = Bulk("end", end, end_all, result=True, last=True)


def _places(database: Database, names: Collection[str]) -> dict[str, _Place]:
    """Where these belong, and nobody else ends a rollout of the same groups until this transaction ends."""
    columns = ("r.id", "r.ended", "r.channel", "r.group_id", "g.min_size")
    chosen = f"FROM rollouts AS r JOIN groups AS g ON g.id = r.group_id WHERE r.id IN ({marks(names)})"
    found = database.rows(columns, f"{chosen} ORDER BY r.id{database.LOCK}", sorted(names))
    return {name: _Place(*place) for name, *place in found}


def _finish(database: Database, given: Sequence[Finish], places: Mapping[str, _Place], *, graded: Sequence[str]) -> None:
    """Write the ends of rollouts that ran till now; `graded` are those with a new grade, once for each."""
    parts = _count_parts(database, places.keys(), Parts._fields)
    finished = [(name, *ending, rows.seal_rollout(name, ending, Parts(**parts[name]))) for name, ending, _ in given]
    database.execute(
        f"""WITH given (name, how, words, sealed) AS (VALUES {tuples(4, len(finished))})
            UPDATE rollouts SET ended = how, message = words, seal = sealed FROM given WHERE id = name""",
        [value for row in finished for value in row],
    )
    tallies = defaultdict[str, list[CounterRow]](list)
    for name, ending, _ in given:
        tallies[places[name].channel].append(CounterRow("end", str(ending.end), 1))
    for channel, state in _close_groups(database, {place.group_id: place for place in places.values()}):
        tallies[channel] += [CounterRow("state", State.OPEN, -1), CounterRow("state", state, 1)]
    for channel, changes in tallies.items():
        database.count(channel, changes)
    told: list[tuple[Kind, str]] = [*(("graded", name) for name in graded), *(("ended", each.rollout_id) for each in given)]
    for part in portions(told):
        database.tell([(kind, places[name].channel, name) for kind, name in part])


def _close_groups(database: Database, groups: Mapping[str, _Place]) -> list[tuple[str, State]]:
    """Close those of the groups, each given by one of its places, that have no running place; the channel and new state of each."""
    query = f"""SELECT group_id, min(oldest), sum(CASE ended WHEN ? THEN 1 ELSE 0 END) FROM rollouts
                WHERE group_id IN ({marks(groups)}) AND current = 1 GROUP BY group_id HAVING count(*) = count(ended)"""
    closed: list[tuple[str, State]] = []
    rows: list[tuple[str, State, int | None]] = []
    for group_id, oldest, completed in database.execute(query, (End.COMPLETED, *groups)).fetchall():
        state = State.SHORT if rules.is_short(completed, groups[group_id].min_size) else State.COMPLETE
        rows.append((group_id, state, oldest))
        closed.append((groups[group_id].channel, state))
    if rows:
        database.execute(
            f"""WITH given (name, now, lowest) AS (VALUES {tuples(3, len(rows))})
                UPDATE groups SET state = now, oldest = CAST(lowest AS BIGINT) FROM given WHERE id = name""",
            [value for row in rows for value in row],
        )
    return closed


def _seal_rollout(database: Database, rollout_id: str) -> None:
    """Keep how many parts the rollout has; of its steps and nodes only once no more can come."""
    ending = Ending(*database.execute("SELECT ended, message FROM rollouts WHERE id = ?", (rollout_id,)).fetchone())
    tables = ("grades", "marks") if ending.end is None else Parts._fields
    counts = _count_parts(database, [rollout_id], tables)[rollout_id]
    sealed = rows.seal_rollout(rollout_id, ending, Parts(*(counts.get(table, -1) for table in Parts._fields)))
    database.execute("UPDATE rollouts SET seal = ? WHERE id = ?", (sealed, rollout_id))


def _count_parts(database: Database, names: Collection[str], tables: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many rows each rollout has in each table."""
    counts = [f"(SELECT count(*) FROM {table} WHERE rollout_id = r.id)" for table in tables]
    found = database.rows(("r.id", *counts), f"FROM rollouts AS r WHERE r.id IN ({marks(names)})", list(names))
    return {name: dict(zip(tables, numbers, strict=True)) for name, *numbers in found}


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
    sealed = rows.seal_group(Opened(group.id, group.channel, int(number), min_size), len(group.rollouts))
    database.execute(
        "INSERT INTO groups (id, channel, seq, state, record, crc, min_size, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (group.id, group.channel, number, State.OPEN, group.task.record, group.task.crc, min_size, sealed),
    )
    for part in portions(group.rollouts):
        _open_rollouts(database, part)
    database.count(group.channel, [CounterRow("state", State.OPEN, 1), CounterRow("top", "seq", int(number))])
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
    database.count(channel, [CounterRow("drop", reason, 1)])
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
    end(database, seal_end(lost.id, End.LOST, reason, ()))
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
    database.count(given[0][0].channel, [CounterRow("count", "rollouts", len(rows))])
