"""How steps are stored, in SQL: one alone, or many together."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.pool import rules
from penstock.pool.database import Database, Tally
from penstock.pool.jobs import Bulk
from penstock.pool.rows import Row, seal
from penstock.pool.rules import Span
from penstock.pool.sql_rows import Running, has, have_all, marks, put, put_all, running
from penstock.records import Node, Step


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


def _tallies(given: Sequence[Append], added: Sequence[Added]) -> list[Tally]:
    """What these steps and new nodes add to the running counts of their channel."""
    return [
        Tally("count", "steps", len(given)),
        Tally("count", "tokens", sum(each.sampled for each in given)),
        Tally("top", "version", max(each.versions.newest for each in given)),
        *([Tally("count", "prompt_tokens", sum(each.tokens for each in added))] if added else []),
        *(Tally("break", reason, n) for reason, n in Counter(each.reason for each in added if each.reason is not None).items()),
    ]
