"""The leases of a pool, in SQL. Each function is one atomic change and may refuse it with PoolError."""

from typing import NamedTuple

from penstock.pool import rules
from penstock.pool.base import CounterChange, PoolDatabase
from penstock.pool.rows import damaged, ledger_checksum
from penstock.pool.rules import GroupState, LeaseClock, LedgerEntry, OpenLease
from penstock.pool.writes import count_move


class ClaimRequest(NamedTuple):
    lease_id: str
    """Id for the new lease."""
    groups: int
    channel: str
    version: int
    max_staleness: int
    lease_s: float


class ClaimResult(NamedTuple):
    group_ids: list[str]
    stale: int
    """Groups dropped as stale since the last lease."""


def open_leases(database: PoolDatabase) -> list[OpenLease]:
    """Return the leases that are neither released nor acknowledged nor known to have expired."""
    return [OpenLease(*row) for row in database.execute("SELECT id, beat, lease_s FROM leases WHERE open = 1")]


def claim(database: PoolDatabase, clock: LeaseClock, request: ClaimRequest) -> ClaimResult | None:
    """Drop stale groups, then lease the oldest complete ones. Returns None if there are too few."""
    _expire(database, clock)
    _drop_stale(database, request)
    query = f"SELECT id FROM groups WHERE channel = ? AND state = ? ORDER BY seq, id LIMIT ?{database.SKIP}"
    ids = [row[0] for row in database.execute(query, (request.channel, GroupState.COMPLETE, request.groups))]
    if len(ids) < request.groups:
        return None
    database.execute("INSERT INTO leases (id, open, beat, lease_s) VALUES (?, 1, 0, ?)", (request.lease_id, request.lease_s))
    for position, group_id in enumerate(ids):
        database.execute(
            "INSERT INTO lease_groups (lease_id, position, group_id) VALUES (?, ?, ?)", (request.lease_id, position, group_id)
        )
        database.execute("UPDATE groups SET state = ?, lease_id = ? WHERE id = ?", (GroupState.LEASED, request.lease_id, group_id))
    count_move(database, request.channel, GroupState.COMPLETE, GroupState.LEASED, len(ids))
    database.log_changes([("lent", request.channel, group_id) for group_id in ids])
    clock.start(OpenLease(request.lease_id, 0, request.lease_s))
    return ClaimResult(ids, _report_stale(database, request.channel))


def renew(database: PoolDatabase, clock: LeaseClock, lease_id: str, lease_s: float) -> bool:
    """Renew a lease. Returns False if it is over, instead of raising: leases found expired on the way must be committed."""
    _check_known(database, lease_id)
    _expire(database, clock)
    row = database.execute(
        "UPDATE leases SET beat = beat + 1, lease_s = ? WHERE id = ? AND open = 1 RETURNING beat", (lease_s, lease_id)
    ).fetchone()
    if row is None:
        return False
    clock.start(OpenLease(lease_id, row[0], lease_s))
    return True


def release(database: PoolDatabase, lease_id: str | None) -> None:
    if lease_id is None:
        _check_states(database)
    else:
        _check_known(database, lease_id)
    for name in [lease.lease_id for lease in open_leases(database)] if lease_id is None else [lease_id]:
        _close(database, name)


def ack(database: PoolDatabase, lease_id: str, policy_version: int) -> None:
    """Enter the lease's groups into the ledger; none of them if another lease holds or has trained one."""
    _check_known(database, lease_id)
    rows = database.execute(
        f"""SELECT g.id, g.channel, g.state, g.lease_id, t.lease_id, t.version
           FROM lease_groups AS l JOIN groups AS g ON g.id = l.group_id LEFT JOIN ledger AS t ON t.group_id = g.id
           WHERE l.lease_id = ? ORDER BY l.position{_lock_groups(database)}""",
        (lease_id,),
    ).fetchall()
    for group_id, channel, state, last_lease, trained_by, version in rows:
        holder = last_lease if state == GroupState.LEASED else None
        trained = None if trained_by is None else LedgerEntry(trained_by, version)
        if rules.check_acknowledgement(group_id, lease_id, policy_version, holder=holder, trained=trained):
            database.execute(
                "INSERT INTO ledger (group_id, lease_id, version, seal) VALUES (?, ?, ?, ?)",
                (group_id, lease_id, policy_version, ledger_checksum(group_id, lease_id, policy_version)),
            )
            database.execute("UPDATE groups SET state = ? WHERE id = ?", (GroupState.TRAINED, group_id))
            count_move(database, channel, state, GroupState.TRAINED)
            database.add_counts(channel, [CounterChange("top", "version", policy_version)])
            database.log_changes([("trained", channel, group_id)])
    database.execute("UPDATE leases SET open = 0 WHERE id = ?", (lease_id,))


def undo(database: PoolDatabase, policy_version: int) -> list[tuple[str, int]]:
    """Take the groups of later versions out of the ledger; each can be claimed again."""
    lost = database.execute(
        f"""SELECT g.id, t.version, g.channel FROM ledger AS t JOIN groups AS g ON g.id = t.group_id
           WHERE t.version > ? ORDER BY t.position{_lock_groups(database)}""",
        (policy_version,),
    ).fetchall()
    for group_id, _, channel in lost:
        database.execute("DELETE FROM ledger WHERE group_id = ?", (group_id,))
        database.execute("UPDATE groups SET state = ? WHERE id = ?", (GroupState.COMPLETE, group_id))
        count_move(database, channel, GroupState.TRAINED, GroupState.COMPLETE)
        database.log_changes([("undone", channel, group_id)])
    return [(group_id, version) for group_id, version, _ in lost]


RUN_ID = "run"
"""The kind of the counter whose name is the id of the pool's run; it needs no separate table."""


def read_run_id(database: PoolDatabase) -> str:
    row = database.execute("SELECT name FROM tally WHERE kind = ?", (RUN_ID,)).fetchone()
    return row[0] if row else ""


def set_run_id(database: PoolDatabase, run_id: str) -> None:
    if not read_run_id(database):
        database.add_counts("", [CounterChange(RUN_ID, run_id, 1)])


def _check_states(database: PoolDatabase) -> None:
    # one statement, as its parts must see the same snapshot
    wrong = database.execute(
        """SELECT channel, name FROM (
             SELECT channel, name, n FROM tally WHERE kind = 'state' UNION ALL SELECT channel, state, -1 FROM groups
           ) AS counted GROUP BY channel, name HAVING sum(n) <> 0"""
    ).fetchone()
    if wrong is not None:
        raise damaged(f"channel {wrong[0]!r}", f"the number of groups that are {wrong[1]!r} differs from their count")
    orphan = database.execute(
        """SELECT g.id FROM groups AS g LEFT JOIN leases AS l ON l.id = g.lease_id AND l.open = 1
           WHERE g.state = ? AND l.id IS NULL""",
        (GroupState.LEASED,),
    ).fetchone()
    if orphan is not None:
        raise damaged(f"group {orphan[0]!r}", "it is leased, but its lease is over")


def _check_known(database: PoolDatabase, lease_id: str) -> None:
    if database.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone() is None:
        raise rules.unknown_lease(lease_id)


def _expire(database: PoolDatabase, clock: LeaseClock) -> None:
    for lease_id in clock.expired(open_leases(database)):
        _close(database, lease_id)


def _close(database: PoolDatabase, lease_id: str) -> None:
    database.execute("UPDATE leases SET open = 0 WHERE id = ?", (lease_id,))
    held = database.execute(
        f"""SELECT g.id, g.channel FROM lease_groups AS l JOIN groups AS g ON g.id = l.group_id
           WHERE l.lease_id = ? AND g.lease_id = l.lease_id AND g.state = ?{_lock_groups(database)}""",
        (lease_id, GroupState.LEASED),
    ).fetchall()
    for group_id, channel in held:
        database.execute("UPDATE groups SET state = ? WHERE id = ?", (GroupState.COMPLETE, group_id))
        count_move(database, channel, GroupState.LEASED, GroupState.COMPLETE)
        database.log_changes([("returned", channel, group_id)])


def _drop_stale(database: PoolDatabase, request: ClaimRequest) -> None:
    dropped = database.execute(
        "UPDATE groups SET state = ? WHERE channel = ? AND state = ? AND oldest < ? RETURNING id, seq",
        (GroupState.STALE, request.channel, GroupState.COMPLETE, request.version - request.max_staleness),
    ).fetchall()
    if dropped:
        count_move(database, request.channel, GroupState.COMPLETE, GroupState.STALE, len(dropped))
        database.add_counts(request.channel, [CounterChange("unreported", "stale", len(dropped))])
        ordered = sorted(dropped, key=lambda group: (group[1], group[0]))
        database.log_changes([("stale", request.channel, group_id) for group_id, _ in ordered])


def _report_stale(database: PoolDatabase, channel: str) -> int:
    """Return how many groups were dropped as stale since the last lease, and reset that count."""
    rows = database.execute("DELETE FROM tally WHERE channel = ? AND kind = 'unreported' RETURNING n", (channel,)).fetchall()
    return sum(row[0] for row in rows)


def _lock_groups(database: PoolDatabase) -> str:
    return f"{database.LOCK} OF g" if database.LOCK else ""
