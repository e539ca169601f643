"""How rollouts are judged and end, in SQL: each function is one atomic change and may refuse it with PoolError."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.pool import rules, seals
from penstock.pool.base import Kind
from penstock.pool.database import Database, Tally
from penstock.pool.jobs import Bulk
from penstock.pool.rows import Ending, Row, grade_key, mark_key, pack_message, seal
from penstock.pool.rules import State
from penstock.pool.seals import Parts
from penstock.pool.sql_rows import has, marks, portions, put, put_all, running, tuples
from penstock.records import End, Grade, Mark


class GradeRow(NamedTuple):
    """A grade, sealed."""

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
    """Store a grade."""
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
    rows = [(name, *ending, seals.seal_rollout(name, ending, Parts(**parts[name]))) for name, ending, _ in given]
    database.execute(
        f"""WITH given (name, how, words, sealed) AS (VALUES {tuples(4, len(rows))})
            UPDATE rollouts SET ended = how, message = words, seal = sealed FROM given WHERE id = name""",
        [value for row in rows for value in row],
    )
    tallies = defaultdict[str, list[Tally]](list)
    for name, ending, _ in given:
        tallies[places[name].channel].append(Tally("end", str(ending.end), 1))
    for channel, state in _close_groups(database, {place.group_id: place for place in places.values()}):
        tallies[channel] += [Tally("state", State.OPEN, -1), Tally("state", state, 1)]
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
    sealed = seals.seal_rollout(rollout_id, ending, Parts(*(counts.get(table, -1) for table in Parts._fields)))
    database.execute("UPDATE rollouts SET seal = ? WHERE id = ?", (sealed, rollout_id))


def _count_parts(database: Database, names: Collection[str], tables: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many rows each rollout has in each table."""
    counts = [f"(SELECT count(*) FROM {table} WHERE rollout_id = r.id)" for table in tables]
    found = database.rows(("r.id", *counts), f"FROM rollouts AS r WHERE r.id IN ({marks(names)})", list(names))
    return {name: dict(zip(tables, numbers, strict=True)) for name, *numbers in found}
