"""Verifies a pool: reads every row with its checksum, and compares keys, token graph, ends, groups, ledger and counters."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from penstock.errors import PoolError
from penstock.pool import reads, rules
from penstock.pool.base import ChangeKind, CheckProgress, PoolDatabase
from penstock.pool.rows import GroupHeader, RecordRow, column_names, decode_row, grade_key, mark_key, verify_group, verify_ledger
from penstock.pool.rules import GroupState
from penstock.records import End, Grade, Mark, Node, Rollout, RolloutRef, Step, Task

PARTS: dict[str, type[Any]] = {"nodes": Node, "steps": Step, "grades": Grade, "marks": Mark}
"""The tables whose rows belong to a rollout."""

_UNREADABLE = (PoolError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What decoding raises on damaged values."""


class PoolFinding(NamedTuple):
    """One thing that is damaged."""

    table: str
    id: str
    """The rollout or group that it belongs to; empty if unknown."""
    what: str


@dataclass(slots=True)
class PoolCheck:
    """How much was read, and what is damaged."""

    groups: int = 0
    rollouts: int = 0
    steps: int = 0
    findings: list[PoolFinding] = field(default_factory=list[PoolFinding])
    damage: tuple[type[BaseException], ...] = ()
    """Errors of the database that mean damaged content."""

    def add(self, table: str, name: str, problem: str) -> None:
        """Add a finding, unless it repeats a recent one."""
        finding = PoolFinding(table, name, problem)
        if finding not in self.findings[-50:]:
            self.findings.append(finding)


@dataclass(slots=True)
class _Recount:
    """What the rows add up to; compared with groups and counters."""

    counters: defaultdict[str, Counter[tuple[str, str]]] = field(default_factory=lambda: defaultdict(Counter))
    channels: dict[str, str] = field(default_factory=dict[str, str])
    """By rollout or group; the two may share a name, but not with different channels."""
    ends: dict[str, str | None] = field(default_factory=dict[str, str | None])
    oldest: dict[str, int | None] = field(default_factory=dict[str, int | None])
    tops: defaultdict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    undone: set[str] = field(default_factory=set[str])
    """Channels with groups whose training was undone: the highest version may be one that no row has any more."""

    def top(self, channel: str, name: str, number: int) -> None:
        self.tops[channel][name] = max(self.tops[channel].get(name, number), number)


def check_database(database: PoolDatabase, progress: CheckProgress, *, damage: tuple[type[BaseException], ...] = ()) -> PoolCheck:
    """Check everything in the open transaction, and continue past what cannot be read.

    `damage` are the errors of the database that mean damaged content, not a broken connection.
    """
    result, recount = PoolCheck(damage=damage), _Recount()
    rollouts = _ids(database, result, "rollouts", "SELECT id FROM rollouts ORDER BY id")
    owners = {
        table: _ids(database, result, table, f"SELECT DISTINCT rollout_id FROM {table} ORDER BY rollout_id") for table in PARTS
    }
    for table, ids in owners.items():
        for name in sorted(ids - rollouts, key=repr):
            result.add(table, _text(name), "belongs to a rollout that is not in the table of rollouts")
    names = sorted(rollouts.union(*owners.values()), key=repr)
    for done, name in enumerate(names, 1):
        _guarded(result, "rollouts", name, lambda name=name: _check_rollout(database, result, recount, name))
        progress(done, len(names))
    groups = _ids(database, result, "groups", "SELECT id FROM groups ORDER BY id")
    for name in sorted(groups, key=repr):
        _guarded(result, "groups", name, lambda name=name: _check_group(database, result, recount, name))
    _guarded(result, "leases", "", lambda: _check_leases(database, result, groups))
    _guarded(result, "ledger", "", lambda: _check_ledger(database, result, groups))
    _guarded(result, "changes", "", lambda: _check_changes(database, result, recount))
    _guarded(result, "tally", "", lambda: _check_counters(database, result, recount))
    return result


def _guarded(result: PoolCheck, table: str, name: Any, check: Callable[[], None]) -> None:
    """Run a check; what it cannot read becomes a finding."""
    try:
        check()
    except (*_UNREADABLE, *result.damage) as cause:
        result.add(table, _text(name), f"cannot be read: {cause}")


def _ids(database: PoolDatabase, result: PoolCheck, table: str, query: str) -> set[str]:
    """Read ids from a table, as far as it can be read."""
    found: set[str] = set()

    def read() -> None:
        for row in database.execute(query):
            found.add(row[0])

    _guarded(result, table, "", read)
    return found


def _check_rollout(database: PoolDatabase, result: PoolCheck, recount: _Recount, name: str) -> None:
    result.rollouts += 1
    query = "SELECT group_id, place, channel, ended, oldest, record, crc FROM rollouts WHERE id = ?"
    found = database.execute(query, (name,)).fetchone()
    if found is None:
        result.add("rollouts", _text(name), "is not found under its id")
        return
    group_id, place, channel, ended, oldest, record, crc = found
    rollout = decode_row(RolloutRef, RecordRow(record, (), crc), "its record")
    if (rollout.id, rollout.group_id, rollout.place, rollout.channel) != (name, group_id, place, channel):
        result.add("rollouts", _text(name), "its columns differ from its record")
    recount.counters[channel]["count", "rollouts"] += 1
    recount.channels[name] = channel
    recount.ends[name] = ended
    if ended is not None:
        recount.counters[channel]["end", str(End(ended))] += 1
    parts = _read_parts(database, result, name)
    _check_graph(result, name, parts)
    _count(recount, channel, parts)
    recount.oldest[name] = rules.oldest_version(min(step.versions, default=None) for step in parts["steps"])
    if recount.oldest[name] != oldest:
        result.add("rollouts", _text(name), f"its oldest version is {oldest}, but its steps say {recount.oldest[name]}")


def _read_parts(database: PoolDatabase, result: PoolCheck, name: str) -> dict[str, list[Any]]:
    """Read a rollout's records as every reader does; if that fails, row by row, so that each bad one is named."""
    rollouts: list[Rollout] = []
    _guarded(result, "rollouts", name, lambda: rollouts.append(reads.read_rollout(database, name)))
    if rollouts:
        parts: dict[str, list[Any]] = {table: list(getattr(rollouts[0], table)) for table in PARTS}
    else:
        parts = {table: list(_read_part(database, result, table, name)) for table in PARTS}
    result.steps += len(parts["steps"])
    return parts


def _read_part(database: PoolDatabase, result: PoolCheck, table: str, name: str) -> Iterator[Any]:
    """Yield the records of one kind that can be read; others become findings."""
    kind = PARTS[table]
    query = f"SELECT id, {', '.join(column_names(kind))} FROM {table} WHERE rollout_id = ? ORDER BY id"
    keys = [row[0] for row in database.execute(f"SELECT id FROM {table} WHERE rollout_id = ? ORDER BY id", (name,))]
    row_query = query.replace(" ORDER BY id", " AND id = ?")
    for key in keys:
        read: list[Any] = []
        _guarded(
            result,
            table,
            name,
            lambda key=key, read=read: read.append(_read_row(kind, database.execute(row_query, (name, key)).fetchone())),
        )
        if read and (read[0].rollout_id, _key(read[0])) != (name, key):
            result.add(table, _text(name), f"row {_text(key)} holds the record of {_text(_key(read[0]))} of {read[0].rollout_id!r}")
            continue
        yield from read


def _read_row(kind: type[Any], row: Any) -> Any:
    if row is None:
        raise PoolError("a row is in the index, but not in the table")
    key, record, *columns, crc = row
    return decode_row(kind, RecordRow(record, tuple(columns), crc), f"row {_text(key)}")


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


def _check_graph(result: PoolCheck, name: str, parts: dict[str, list[Any]]) -> None:
    """Every reference leads to a stored record, and no number is left out."""
    nodes, steps = {node.id for node in parts["nodes"]}, {step.index for step in parts["steps"]}
    for table, numbers in (("nodes", nodes), ("steps", steps)):
        missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
        if missing:
            result.add(table, _text(name), f"number {_list(missing)} is missing")
    for node in parts["nodes"]:
        if node.parent is not None and node.parent not in steps:
            result.add("nodes", _text(name), f"node {node.id} continues step {node.parent}, which is not there")
    for step in parts["steps"]:
        if step.node not in nodes:
            result.add("steps", _text(name), f"step {step.index} continues node {step.node}, which is not there")
        _guarded(result, "steps", name, lambda step=step: rules.check_step(step, None))
    unused = sorted(nodes - {step.node for step in parts["steps"]})
    if unused:
        result.add("steps", _text(name), f"no step continues node {_list(unused)}")
    for table in ("grades", "marks"):
        for part in parts[table]:
            if part.step is not None and part.step not in steps:
                result.add(table, _text(name), f"is about step {part.step}, which is not there")


def _count(recount: _Recount, channel: str, parts: dict[str, list[Any]]) -> None:
    counters = recount.counters[channel]
    for node in parts["nodes"]:
        counters["count", "prompt_tokens"] += len(node.token_ids)
        if node.reason is not None:
            counters["break", node.reason] += 1
    for step in parts["steps"]:
        counters["count", "steps"] += 1
        counters["count", "tokens"] += len(step.completion_ids)
        recount.top(channel, "version", max(step.versions, default=0))


def _check_group(database: PoolDatabase, result: PoolCheck, recount: _Recount, name: str) -> None:
    result.groups += 1
    query = "SELECT channel, seq, min_size, seal, state, oldest, lease_id, record, crc FROM groups WHERE id = ?"
    found = database.execute(query, (name,)).fetchone()
    if found is None:
        result.add("groups", _text(name), "is not found under its id")
        return
    channel, seq, min_size, checksum, state, oldest, lease_id, record, crc = found
    task, state = decode_row(Task, RecordRow(record, (), crc), "its task"), GroupState(state)
    recount.counters[channel]["state", str(state)] += 1
    recount.channels[name] = channel
    recount.top(channel, "seq", seq)
    query = "SELECT id, record, crc FROM rollouts WHERE group_id = ? AND current = 1"
    found = database.execute(query, (name,)).fetchall()
    places = [
        decode_row(RolloutRef, RecordRow(record, (), crc), f"the record of rollout {place!r}") for place, record, crc in found
    ]
    for place, rollout in zip(found, places, strict=True):
        if place[0] != rollout.id:
            result.add("groups", _text(name), f"rollout {rollout.id!r} is stored as {_text(place[0])!r}")
    verify_group(GroupHeader(name, channel, seq, min_size), checksum, task, places)
    running = [rollout.id for rollout in places if recount.ends.get(rollout.id) is None]
    if bool(running) != (state is GroupState.OPEN):
        result.add("groups", _text(name), f"is {state}, but {len(running)} of its {len(places)} rollouts run")
    counted = rules.oldest_version(recount.oldest.get(rollout.id) for rollout in places)
    if not running and counted != oldest:
        result.add("groups", _text(name), f"its oldest version is {oldest}, but its steps say {counted}")
    trained = _check_state(database, result, name, state, lease_id)
    recount.top(channel, "version", trained or 0)


def _check_state(database: PoolDatabase, result: PoolCheck, name: str, state: GroupState, lease_id: str | None) -> int | None:
    """Compare a group's state with its lease and the ledger. Returns the version that it was trained into."""
    ledger = database.execute("SELECT version FROM ledger WHERE group_id = ?", (name,)).fetchone()
    lease = database.execute("SELECT open FROM leases WHERE id = ?", (lease_id,)).fetchone()
    if lease_id is not None and lease is None:
        result.add("groups", _text(name), f"was lent under lease {lease_id!r}, which is not there")
    if state is GroupState.LEASED and lease is not None and lease[0] != 1:
        result.add("groups", _text(name), f"is leased, but lease {lease_id!r} is over")
    if (state is GroupState.TRAINED) != (ledger is not None):
        result.add("ledger", _text(name), f"the group is {state}, but {'is' if ledger else 'is not'} in the ledger")
    return ledger and ledger[0]


def _check_leases(database: PoolDatabase, result: PoolCheck, groups: set[str]) -> None:
    leases = dict(database.execute("SELECT id, open FROM leases").fetchall())
    for lease_id, number, beat, lease_s in database.execute("SELECT id, open, beat, lease_s FROM leases"):
        if number not in (0, 1) or beat < 0 or not lease_s >= 0:
            result.add("leases", "", f"lease {lease_id!r} is none: open {number}, beat {beat}, {lease_s} s")
    for lease_id, position, group_id in database.execute("SELECT lease_id, position, group_id FROM lease_groups"):
        if lease_id not in leases or group_id not in groups or position < 0:
            result.add("lease_groups", _text(group_id), f"lease {lease_id!r} or its group is not there")


def _check_ledger(database: PoolDatabase, result: PoolCheck, groups: set[str]) -> None:
    leases = {row[0] for row in database.execute("SELECT id FROM leases")}
    lines = database.execute("SELECT group_id, lease_id, version, seal FROM ledger ORDER BY position").fetchall()
    _guarded(result, "ledger", "", lambda: verify_ledger(lines, len(lines)))
    for group_id, lease_id, version, _ in lines:
        if group_id not in groups or lease_id not in leases or not isinstance(version, int):
            result.add("ledger", _text(group_id), f"lease {lease_id!r}, version {version!r}: the group or the lease is not there")
        elif not database.execute(
            "SELECT 1 FROM lease_groups WHERE lease_id = ? AND group_id = ?", (lease_id, group_id)
        ).fetchone():
            result.add("ledger", _text(group_id), f"lease {lease_id!r} never held it")


def _check_changes(database: PoolDatabase, result: PoolCheck, recount: _Recount) -> None:
    kinds = set(get_args(ChangeKind))
    for position, kind, channel, name in database.execute("SELECT position, kind, channel, id FROM changes ORDER BY position"):
        if kind == "undone":
            recount.undone.add(channel)
        if kind not in kinds or recount.channels.get(name) != channel:
            result.add(
                "changes", _text(name), f"line {position}: {_text(kind)} in channel {_text(channel)} is nothing that happened"
            )


def _check_counters(database: PoolDatabase, result: PoolCheck, recount: _Recount) -> None:
    stored: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for channel, kind, name, total, highest in database.execute(
        "SELECT channel, kind, name, sum(n), max(n) FROM tally GROUP BY channel, kind, name"
    ):
        stored[channel][kind, name] = int(highest if kind == "top" else total)
    for channel in sorted({*stored, *recount.counters, *recount.tops}, key=repr):
        tops = {("top", name): number for name, number in recount.tops[channel].items()}
        counted = {**recount.counters[channel], **tops}
        if channel in recount.undone:
            counted["top", "version"] = max(counted.get(("top", "version"), 0), stored[channel]["top", "version"])
        for key in sorted({*stored[channel], *counted}, key=repr):
            if key[0] in ("state", "count", "end", "break", "top") and stored[channel][key] != counted.get(key, 0):
                numbers = f"{stored[channel][key]} stored, {counted.get(key, 0)} counted"
                result.add("tally", "", f"channel {_text(channel)}, {key[0]} {_text(key[1])}: {numbers}")


def _text(value: Any) -> str:
    """Return a name for a message; a damaged one may be no text."""
    return value if isinstance(value, str) else repr(value)


def _list(numbers: Iterable[int]) -> str:
    listed = [*numbers]
    return ", ".join(map(str, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
