"""Lending groups and taking them back, in SQL: each function is one atomic change and may refuse it with PoolError."""

from typing import NamedTuple

from penstock.pool import rules
from penstock.pool.leases import Beat, LeaseClock
from penstock.pool.rows import seal_line
from penstock.pool.rules import State, Trained
from penstock.pool.sql.database import CounterRow, Database
from penstock.pool.sql.writes import count_move


class Wanted(NamedTuple):
    """What a claim asks for."""

    lease_id: str
    """Of the lease to be."""
    groups: int
    channel: str
    version: int
    max_staleness: int
    lease_s: float


class Lent(NamedTuple):
    """What a claim was given."""

    group_ids: list[str]
    stale: int


def open_beats(database: Database) -> list[Beat]:
    """All leases that are neither given back nor acknowledged nor known to have expired."""
    return [Beat(*row) for row in database.execute("SELECT id, beat, lease_s FROM leases WHERE open = 1")]


def claim(database: Database, clock: LeaseClock, wanted: Wanted) -> Lent | None:
    """Drop what is stale, then lend the oldest groups if there are enough."""
    _expire(database, clock)
    _drop_stale(database, wanted)
    query = f"SELECT id FROM groups WHERE channel = ? AND state = ? ORDER BY seq, id LIMIT ?{database.SKIP}"
    ids = [row[0] for row in database.execute(query, (wanted.channel, State.COMPLETE, wanted.groups))]
    if len(ids) < wanted.groups:
        return None
    database.execute("INSERT INTO leases (id, open, beat, lease_s) VALUES (?, 1, 0, ?)", (wanted.lease_id, wanted.lease_s))
    for position, group_id in enumerate(ids):
        database.execute(
            "INSERT INTO lease_groups (lease_id, position, group_id) VALUES (?, ?, ?)", (wanted.lease_id, position, group_id)
        )
        database.execute("UPDATE groups SET state = ?, lease_id = ? WHERE id = ?", (State.LEASED, wanted.lease_id, group_id))
    count_move(database, wanted.channel, State.COMPLETE, State.LEASED, len(ids))
    database.tell([("lent", wanted.channel, group_id) for group_id in ids])
    clock.see(Beat(wanted.lease_id, 0, wanted.lease_s))
    return Lent(ids, _report_stale(database, wanted.channel))


def renew(database: Database, clock: LeaseClock, lease_id: str, lease_s: float) -> bool:
    """Give a lease more time; False where it is over, so that the expiry found on the way is kept."""
    _known(database, lease_id)
    _expire(database, clock)
    row = database.execute(
        "UPDATE leases SET beat = beat + 1, lease_s = ? WHERE id = ? AND open = 1 RETURNING beat", (lease_s, lease_id)
    ).fetchone()
    if row is None:
        return False
    clock.see(Beat(lease_id, row[0], lease_s))
    return True


def release(database: Database, lease_id: str | None) -> None:
    """Close one lease, or all."""
    if lease_id is not None:
        _known(database, lease_id)
    for one in [beat.lease_id for beat in open_beats(database)] if lease_id is None else [lease_id]:
        _close(database, one)


def ack(database: Database, lease_id: str, policy_version: int) -> None:
    """Enter the lease's groups into the ledger: all of them or, where one is held or trained by another, none."""
    _known(database, lease_id)
    rows = database.execute(
        f"""SELECT g.id, g.channel, g.state, g.lease_id, t.lease_id, t.version
           FROM lease_groups AS l JOIN groups AS g ON g.id = l.group_id LEFT JOIN ledger AS t ON t.group_id = g.id
           WHERE l.lease_id = ? ORDER BY l.position{_of_groups(database)}""",
        (lease_id,),
    ).fetchall()
    for group_id, channel, state, last, by, version in rows:
        holder = last if state == State.LEASED else None
        trained = None if by is None else Trained(by, version)
        if rules.acknowledges(group_id, lease_id, policy_version, holder=holder, trained=trained):
            database.execute(
                "INSERT INTO ledger (group_id, lease_id, version, seal) VALUES (?, ?, ?, ?)",
                (group_id, lease_id, policy_version, seal_line(group_id, lease_id, policy_version)),
            )
            database.execute("UPDATE groups SET state = ? WHERE id = ?", (State.TRAINED, group_id))
            count_move(database, channel, state, State.TRAINED)
            database.count(channel, [CounterRow("top", "version", policy_version)])
            database.tell([("trained", channel, group_id)])
    database.execute("UPDATE leases SET open = 0 WHERE id = ?", (lease_id,))


def _known(database: Database, lease_id: str) -> None:
    if database.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone() is None:
        raise rules.unknown_lease(lease_id)


def _expire(database: Database, clock: LeaseClock) -> None:
    for lease_id in clock.expired(open_beats(database)):
        _close(database, lease_id)


def _close(database: Database, lease_id: str) -> None:
    """Give back those groups that the lease still holds."""
    database.execute("UPDATE leases SET open = 0 WHERE id = ?", (lease_id,))
    held = database.execute(
        f"""SELECT g.id, g.channel FROM lease_groups AS l JOIN groups AS g ON g.id = l.group_id
           WHERE l.lease_id = ? AND g.lease_id = l.lease_id AND g.state = ?{_of_groups(database)}""",
        (lease_id, State.LEASED),
    ).fetchall()
    for group_id, channel in held:
        database.execute("UPDATE groups SET state = ? WHERE id = ?", (State.COMPLETE, group_id))
        count_move(database, channel, State.LEASED, State.COMPLETE)
        database.tell([("returned", channel, group_id)])


def _drop_stale(database: Database, wanted: Wanted) -> None:
    dropped = database.execute(
        "UPDATE groups SET state = ? WHERE channel = ? AND state = ? AND oldest < ? RETURNING id, seq",
        (State.STALE, wanted.channel, State.COMPLETE, wanted.version - wanted.max_staleness),
    ).fetchall()
    if dropped:
        count_move(database, wanted.channel, State.COMPLETE, State.STALE, len(dropped))
        database.count(wanted.channel, [CounterRow("unreported", "stale", len(dropped))])
        in_order = sorted(dropped, key=lambda group: (group[1], group[0]))
        database.tell([("stale", wanted.channel, group_id) for group_id, _ in in_order])


def _report_stale(database: Database, channel: str) -> int:
    """How many groups were dropped since the last lease; they are told once."""
    rows = database.execute("DELETE FROM tally WHERE channel = ? AND kind = 'unreported' RETURNING n", (channel,)).fetchall()
    return sum(row[0] for row in rows)


def _of_groups(database: Database) -> str:
    return f"{database.LOCK} OF g" if database.LOCK else ""
