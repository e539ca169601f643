"""What a pool's tables must agree on, row by row: checksums, keys, the token graph, ends, groups, ledger and running counts."""

import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

from penstock.errors import PoolError
from penstock.pool import rows, rules
from penstock.pool.base import Kind
from penstock.pool.rows import Opened, Row, column_names, grade_key, mark_key, unseal
from penstock.pool.rules import State
from penstock.pool.sql import reads
from penstock.pool.sql.database import Database, SqliteDatabase
from penstock.pool.sqlite_file import APPLICATION_ID, BUSY_S, MIGRATIONS, explain
from penstock.records import Attempt, End, Grade, Mark, Node, Rollout, Step, Task

PARTS: dict[str, type[Any]] = {"nodes": Node, "steps": Step, "grades": Grade, "marks": Mark}
"""The tables whose rows belong to a rollout."""

Told = Callable[[int, int], None]
"""Is told how many rollouts of how many are done."""


_UNREADABLE = (PoolError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What comes of values that are none of those that were written."""


class Finding(NamedTuple):
    """Something that is not as it was written."""

    table: str
    id: str
    """Of the rollout or group it belongs to; empty where that is not known."""
    what: str


@dataclass(slots=True)
class Checked:
    """What was read, and what was found."""

    groups: int = 0
    rollouts: int = 0
    steps: int = 0
    findings: list[Finding] = field(default_factory=list[Finding])
    damage: tuple[type[BaseException], ...] = ()
    """What the database raises where its content is at fault."""

    def find(self, table: str, name: str, what: str) -> None:
        """Write down a finding, once."""
        finding = Finding(table, name, what)
        if finding not in self.findings[-50:]:
            self.findings.append(finding)


@dataclass(slots=True)
class _Facts:
    """What the rows say, to be held against groups and counts."""

    tally: defaultdict[str, Counter[tuple[str, str]]] = field(default_factory=lambda: defaultdict(Counter))
    channels: dict[str, str] = field(default_factory=dict[str, str])
    """Of rollouts and of groups, which may have the same name but not another channel."""
    ends: dict[str, str | None] = field(default_factory=dict[str, str | None])
    oldest: dict[str, int | None] = field(default_factory=dict[str, int | None])
    tops: defaultdict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))

    def top(self, channel: str, name: str, number: int) -> None:
        self.tops[channel][name] = max(self.tops[channel].get(name, number), number)


def check_database(database: Database, told: Told, *, damage: tuple[type[BaseException], ...] = ()) -> Checked:
    """Read everything that can be read, in the transaction that is open, and go on where something cannot.

    `damage` are the errors of the database that tell of its content rather than of a connection that broke.
    """
    checked, facts = Checked(damage=damage), _Facts()
    rollouts = _ids(database, checked, "rollouts", "SELECT id FROM rollouts ORDER BY id")
    owners = {
        table: _ids(database, checked, table, f"SELECT DISTINCT rollout_id FROM {table} ORDER BY rollout_id") for table in PARTS
    }
    for table, names in owners.items():
        for name in sorted(names - rollouts, key=repr):
            checked.find(table, _text(name), "belongs to a rollout that is not in the table of rollouts")
    everyone = sorted(rollouts.union(*owners.values()), key=repr)
    for done, name in enumerate(everyone, 1):
        _guarded(checked, "rollouts", name, lambda name=name: _check_rollout(database, checked, facts, name))
        told(done, len(everyone))
    groups = _ids(database, checked, "groups", "SELECT id FROM groups ORDER BY id")
    for name in sorted(groups, key=repr):
        _guarded(checked, "groups", name, lambda name=name: _check_group(database, checked, facts, name))
    _guarded(checked, "leases", "", lambda: _check_leases(database, checked, groups))
    _guarded(checked, "ledger", "", lambda: _check_ledger(database, checked, groups))
    _guarded(checked, "changes", "", lambda: _check_changes(database, checked, facts))
    _guarded(checked, "tally", "", lambda: _check_tally(database, checked, facts))
    return checked


def _guarded(checked: Checked, table: str, name: Any, check: Callable[[], None]) -> None:
    """Run a check; what it cannot read is a finding, and the next one goes on."""
    try:
        check()
    except (*_UNREADABLE, *checked.damage) as cause:
        checked.find(table, _text(name), f"cannot be read: {cause}")


def _ids(database: Database, checked: Checked, table: str, query: str) -> set[str]:
    """Names out of a table, as far as it can be read."""
    found: set[str] = set()

    def read() -> None:
        for row in database.execute(query):
            found.add(row[0])

    _guarded(checked, table, "", read)
    return found


def _check_rollout(database: Database, checked: Checked, facts: _Facts, name: str) -> None:
    checked.rollouts += 1
    query = "SELECT group_id, place, channel, ended, oldest, record, crc FROM rollouts WHERE id = ?"
    found = database.execute(query, (name,)).fetchone()
    if found is None:
        checked.find("rollouts", _text(name), "is not found under its id")
        return
    group_id, place, channel, ended, oldest, record, crc = found
    rollout = unseal(Rollout, Row(record, (), crc), "its record")
    if (rollout.id, rollout.group_id, rollout.place, rollout.channel) != (name, group_id, place, channel):
        checked.find("rollouts", _text(name), "its columns differ from its record")
    facts.tally[channel]["count", "rollouts"] += 1
    facts.channels[name] = channel
    facts.ends[name] = ended
    if ended is not None:
        facts.tally[channel]["end", str(End(ended))] += 1
    parts = _read_parts(database, checked, name)
    _check_graph(checked, name, parts)
    _count(facts, channel, parts)
    facts.oldest[name] = rules.oldest_version(min(step.versions, default=None) for step in parts["steps"])
    if facts.oldest[name] != oldest:
        checked.find("rollouts", _text(name), f"its oldest version is {oldest}, but its steps say {facts.oldest[name]}")


def _read_parts(database: Database, checked: Checked, name: str) -> dict[str, list[Any]]:
    """All that belongs to a rollout, read as every reader does; row by row where that fails, so that each bad one is named."""
    whole: list[Attempt] = []
    _guarded(checked, "rollouts", name, lambda: whole.append(reads.read_attempt(database, name)))
    if whole:
        parts: dict[str, list[Any]] = {table: list(getattr(whole[0], table)) for table in PARTS}
    else:
        parts = {table: list(_read_part(database, checked, table, name)) for table in PARTS}
    checked.steps += len(parts["steps"])
    return parts


def _read_part(database: Database, checked: Checked, table: str, name: str) -> Iterator[Any]:
    """The records of one kind that can be read; the others are findings."""
    kind = PARTS[table]
    query = f"SELECT id, {', '.join(column_names(kind))} FROM {table} WHERE rollout_id = ? ORDER BY id"
    keys = [row[0] for row in database.execute(f"SELECT id FROM {table} WHERE rollout_id = ? ORDER BY id", (name,))]
    one = query.replace(" ORDER BY id", " AND id = ?")
    for key in keys:
        read: list[Any] = []
        _guarded(
            checked,
            table,
            name,
            lambda key=key, read=read: read.append(_read_row(kind, database.execute(one, (name, key)).fetchone())),
        )
        if read and (read[0].rollout_id, _key(read[0])) != (name, key):
            checked.find(
                table, _text(name), f"row {_text(key)} holds the record of {_text(_key(read[0]))} of {read[0].rollout_id!r}"
            )
            continue
        yield from read


def _read_row(kind: type[Any], row: Any) -> Any:
    if row is None:
        raise PoolError("a row is in the index, but not in the table")
    key, record, *columns, crc = row
    return unseal(kind, Row(record, tuple(columns), crc), f"row {_text(key)}")


def _key(record: Any) -> Any:
    match record:
        case Node():
            return record.id
        case Step():
            return record.index
        case Grade():
            return grade_key(record)
        case _:
            return mark_key(record)


def _check_graph(checked: Checked, name: str, parts: dict[str, list[Any]]) -> None:
    """Every part refers to one that is there, and no number is left out."""
    nodes, steps = {node.id for node in parts["nodes"]}, {step.index for step in parts["steps"]}
    for table, numbers in (("nodes", nodes), ("steps", steps)):
        missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
        if missing:
            checked.find(table, _text(name), f"number {_list(missing)} is missing")
    for node in parts["nodes"]:
        if node.parent is not None and node.parent not in steps:
            checked.find("nodes", _text(name), f"node {node.id} continues step {node.parent}, which is not there")
    for step in parts["steps"]:
        if step.node not in nodes:
            checked.find("steps", _text(name), f"step {step.index} continues node {step.node}, which is not there")
        _guarded(checked, "steps", name, lambda step=step: rules.check_step(step, None))
    unused = sorted(nodes - {step.node for step in parts["steps"]})
    if unused:
        checked.find("steps", _text(name), f"no step continues node {_list(unused)}")
    for table in ("grades", "marks"):
        for part in parts[table]:
            if part.step is not None and part.step not in steps:
                checked.find(table, _text(name), f"is about step {part.step}, which is not there")


def _count(facts: _Facts, channel: str, parts: dict[str, list[Any]]) -> None:
    tally = facts.tally[channel]
    for node in parts["nodes"]:
        tally["count", "prompt_tokens"] += len(node.token_ids)
        if node.reason is not None:
            tally["break", node.reason] += 1
    for step in parts["steps"]:
        tally["count", "steps"] += 1
        tally["count", "tokens"] += len(step.completion_ids)
        facts.top(channel, "version", max(step.versions, default=0))


def _check_group(database: Database, checked: Checked, facts: _Facts, name: str) -> None:
    checked.groups += 1
    query = "SELECT channel, seq, min_size, seal, state, oldest, lease_id, record, crc FROM groups WHERE id = ?"
    found = database.execute(query, (name,)).fetchone()
    if found is None:
        checked.find("groups", _text(name), "is not found under its id")
        return
    channel, seq, min_size, seal, state, oldest, lease_id, record, crc = found
    task, state = unseal(Task, Row(record, (), crc), "its task"), State(state)
    facts.tally[channel]["state", str(state)] += 1
    facts.channels[name] = channel
    facts.top(channel, "seq", seq)
    query = "SELECT id, record, crc FROM rollouts WHERE group_id = ? AND current = 1"
    found = database.execute(query, (name,)).fetchall()
    places = [unseal(Rollout, Row(record, (), crc), f"the record of rollout {place!r}") for place, record, crc in found]
    for place, rollout in zip(found, places, strict=True):
        if place[0] != rollout.id:
            checked.find("groups", _text(name), f"rollout {rollout.id!r} is stored as {_text(place[0])!r}")
    rows.check_group(Opened(name, channel, seq, min_size), seal, task, places)
    running = [rollout.id for rollout in places if facts.ends.get(rollout.id) is None]
    if bool(running) != (state is State.OPEN):
        checked.find("groups", _text(name), f"is {state}, but {len(running)} of its {len(places)} rollouts run")
    counted = rules.oldest_version(facts.oldest.get(rollout.id) for rollout in places)
    if not running and counted != oldest:
        checked.find("groups", _text(name), f"its oldest version is {oldest}, but its steps say {counted}")
    trained = _check_state(database, checked, name, state, lease_id)
    facts.top(channel, "version", trained or 0)


def _check_state(database: Database, checked: Checked, name: str, state: State, lease_id: str | None) -> int | None:
    """A group's state against the lease that holds it and the ledger; the version that it was trained into."""
    ledger = database.execute("SELECT version FROM ledger WHERE group_id = ?", (name,)).fetchone()
    lease = database.execute("SELECT open FROM leases WHERE id = ?", (lease_id,)).fetchone()
    if lease_id is not None and lease is None:
        checked.find("groups", _text(name), f"was lent under lease {lease_id!r}, which is not there")
    if state is State.LEASED and lease is not None and lease[0] != 1:
        checked.find("groups", _text(name), f"is leased, but lease {lease_id!r} is over")
    if (state is State.TRAINED) != (ledger is not None):
        checked.find("ledger", _text(name), f"the group is {state}, but {'is' if ledger else 'is not'} in the ledger")
    return ledger and ledger[0]


def _check_leases(database: Database, checked: Checked, groups: set[str]) -> None:
    leases = dict(database.execute("SELECT id, open FROM leases").fetchall())
    for lease_id, number, beat, lease_s in database.execute("SELECT id, open, beat, lease_s FROM leases"):
        if number not in (0, 1) or beat < 0 or not lease_s >= 0:
            checked.find("leases", "", f"lease {lease_id!r} is none: open {number}, beat {beat}, {lease_s} s")
    for lease_id, position, group_id in database.execute("SELECT lease_id, position, group_id FROM lease_groups"):
        if lease_id not in leases or group_id not in groups or position < 0:
            checked.find("lease_groups", _text(group_id), f"lease {lease_id!r} or its group is not there")


def _check_ledger(database: Database, checked: Checked, groups: set[str]) -> None:
    leases = {row[0] for row in database.execute("SELECT id FROM leases")}
    lines = database.execute("SELECT group_id, lease_id, version, seal FROM ledger ORDER BY position").fetchall()
    _guarded(checked, "ledger", "", lambda: rows.check_ledger(lines, len(lines)))
    for group_id, lease_id, version, _ in lines:
        if group_id not in groups or lease_id not in leases or not isinstance(version, int):
            checked.find("ledger", _text(group_id), f"lease {lease_id!r}, version {version!r}: the group or the lease is not there")
        elif not database.execute(
            "SELECT 1 FROM lease_groups WHERE lease_id = ? AND group_id = ?", (lease_id, group_id)
        ).fetchone():
            checked.find("ledger", _text(group_id), f"lease {lease_id!r} never held it")


def _check_changes(database: Database, checked: Checked, facts: _Facts) -> None:
    kinds = set(get_args(Kind))
    for position, kind, channel, name in database.execute("SELECT position, kind, channel, id FROM changes ORDER BY position"):
        if kind not in kinds or facts.channels.get(name) != channel:
            checked.find(
                "changes", _text(name), f"line {position}: {_text(kind)} in channel {_text(channel)} is nothing that happened"
            )


def _check_tally(database: Database, checked: Checked, facts: _Facts) -> None:
    """The running counts, which statistics are read from."""
    stored: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for channel, kind, name, total, highest in database.execute(
        "SELECT channel, kind, name, sum(n), max(n) FROM tally GROUP BY channel, kind, name"
    ):
        stored[channel][kind, name] = int(highest if kind == "top" else total)
    for channel in sorted({*stored, *facts.tally, *facts.tops}, key=repr):
        tops = {("top", name): number for name, number in facts.tops[channel].items()}
        true = {**facts.tally[channel], **tops}
        for key in sorted({*stored[channel], *true}, key=repr):
            if key[0] in ("state", "count", "end", "break", "top") and stored[channel][key] != true.get(key, 0):
                text = (
                    f"channel {_text(channel)}, {key[0]} {_text(key[1])}: {stored[channel][key]} stored, {true.get(key, 0)} counted"
                )
                checked.find("tally", "", text)


def _text(value: Any) -> str:
    """A name that may be damaged."""
    return value if isinstance(value, str) else repr(value)


def _list(numbers: Iterable[int]) -> str:
    first = [*numbers]
    return ", ".join(map(str, first[:5])) + (f" and {len(first) - 5} more" if len(first) > 5 else "")


FAULTS_NAMED = 1000
"""Of the file; one bad page may make thousands."""
_DAMAGE = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)
"""What reading a damaged file may raise: a length that was hit asks for any amount of memory."""


def check_file(path: Path, told: Told) -> Checked:
    """Check the pool in this file, which must exist; a file that cannot be opened is a finding."""
    try:
        with closing(_open(path)) as database:
            strange = _strange(database)
            if strange:
                checked = Checked()
                checked.find("file", "", strange)
                return checked
            database.begin_reading()
            faults = _file_faults(database)
            checked = check_database(database, told, damage=_DAMAGE)
            for fault in faults:
                checked.find(*_place(database, fault), fault)
    except _DAMAGE as cause:
        checked = Checked()
        checked.find("file", "", str(explain(cause, path)))
    return checked


def _open(path: Path) -> SqliteDatabase:
    """A connection that cannot write; where not even the log beside the file can be opened, the file alone is read."""
    where = path.resolve().as_uri()
    database = _connect(f"{where}?mode=ro")
    try:
        database.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError as cause:
        database.close()
        closed = cause.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        if not closed or path.with_name(f"{path.name}-wal").exists():
            raise
        return _connect(f"{where}?mode=ro&immutable=1")
    except BaseException:
        database.close()
        raise
    return database


def _connect(uri: str) -> SqliteDatabase:
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, factory=SqliteDatabase)


def _strange(database: SqliteDatabase) -> str | None:
    """What the file is, where it is no pool of this format."""
    ours, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if ours != APPLICATION_ID:
        return "its mark says that it is not a penstock pool"
    if version > len(MIGRATIONS):
        return f"its format {version} is that of a newer penstock; upgrade penstock"
    if version < len(MIGRATIONS):
        return f"its format {version} is that of an earlier penstock; `penstock pool stats` brings it up to date, then verify again"
    return None


def _file_faults(database: SqliteDatabase) -> list[str]:
    """What SQLite itself finds: pages, cells, and indices that do not match their tables."""
    try:
        rows = database.execute(f"PRAGMA integrity_check({FAULTS_NAMED})").fetchall()
    except _DAMAGE as cause:
        return [f"cannot be checked: {cause}"]
    lines = [line for row in rows for line in str(row[0]).splitlines()]
    return [line for line in lines if line != "ok" and not line.startswith("***")]


def _place(database: SqliteDatabase, fault: str) -> tuple[str, str]:
    """The table that a fault is in, and the rollout or group where one can be told."""
    found = re.search(r"(?:row (\d+) missing from|in|of entries in) index (\w+)", fault)
    if found is None:
        return "file", ""
    row, index = found.groups()
    try:
        table = database.execute("SELECT tbl_name FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        if table is None or row is None:
            return table[0] if table else "file", ""
        column = {"groups": "id", "rollouts": "id", "leases": "id", "ledger": "group_id"}.get(table[0], "rollout_id")
        name = database.execute(f"SELECT {column} FROM {table[0]} NOT INDEXED WHERE rowid = ?", (int(row),)).fetchone()
        return table[0], str(name[0]) if name else ""
    except _DAMAGE:
        return "file", ""
