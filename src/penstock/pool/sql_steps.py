"""How steps are stored, in SQL: one alone, or many together."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.pool import rules
from penstock.pool.database import Database, Tally
from penstock.pool.rows import Row, seal
from penstock.pool.rules import Span
from penstock.pool.sql_rows import Running, has, have_all, marks, put, put_all, running
from penstock.records import Node, Step


class Append(NamedTuple):
    """A step and the node that it added, sealed."""

    step: Step
    node: Node | None
    row: Row
    node_row: Row | None
    versions: Span


def seal_append(step: Step, node: Node | None) -> Append:
    """Check and write down what `append` stores."""
    rules.check_step(step, node)
    row, node_row = seal(step, rules.step_name(step)), node and seal(node, rules.node_name(node))
    return Append(step, node, row, node_row, rules.version_span(step.versions))


def append(database: Database, given: Append) -> None:
    """Store a step and its node."""
    step, node, row, node_row, versions = given
    channel, oldest = running(database, step.rollout_id, rules.step_name(step))
    added = None
    if node is None or node_row is None:
        if not has(database, "nodes", step.rollout_id, step.node):
            raise rules.missing_node(step)
    elif put(database, "nodes", (step.rollout_id, node.id), node_row, rules.node_name(node)):
        if node.parent is not None and not has(database, "steps", node.rollout_id, node.parent):
            raise rules.missing_parent(node)
        added = node
    if not put(database, "steps", (step.rollout_id, step.index), row, rules.step_name(step)):
        return
    lowest = rules.oldest_version((oldest, versions.oldest))
    if lowest != oldest:
        database.execute("UPDATE rollouts SET oldest = ? WHERE id = ?", (lowest, step.rollout_id))
    database.count(channel, _tallies([given], [added] if added else []))


def append_all(database: Database, given: Sequence[Append]) -> bool:
    """Store several at once, in few statements; False where one of them is not plainly new, whatever was written till then.

    Each statement lets other threads in and has to wait for its turn again, so fewer statements cost more than their number saves.
    """
    rollouts = {each.step.rollout_id for each in given}
    chosen = f"FROM rollouts WHERE id IN ({marks(rollouts)}) ORDER BY id{database.LOCK}"
    found = database.rows(("id", "ended", "channel", "oldest"), chosen, sorted(rollouts))
    open_ones = {name: Running(channel, oldest) for name, ended, channel, oldest in found if ended is None}
    nodes = [(each.node, each.node_row) for each in given if each.node is not None and each.node_row is not None]
    if len(open_ones) < len(rollouts):
        return False
    stored = put_all(database, "nodes", [((node.rollout_id, node.id), row) for node, row in nodes])
    stored = stored and put_all(database, "steps", [((each.step.rollout_id, each.step.index), each.row) for each in given])
    parents = {(node.rollout_id, node.parent) for node, _ in nodes if node.parent is not None}
    if not stored or not have_all(database, "steps", parents):
        return False
    if not have_all(database, "nodes", {(each.step.rollout_id, each.step.node) for each in given if each.node is None}):
        return False
    lowered: dict[str, int | None] = {}
    for each in given:
        channel, oldest = open_ones[each.step.rollout_id]
        lowest = rules.oldest_version((oldest, each.versions.oldest))
        if lowest != oldest:
            open_ones[each.step.rollout_id] = Running(channel, lowest)
            lowered[each.step.rollout_id] = lowest
    for lowest in set(lowered.values()):
        names = [name for name, value in lowered.items() if value == lowest]
        database.execute(f"UPDATE rollouts SET oldest = ? WHERE id IN ({marks(names)})", (lowest, *names))
    for channel in {each.channel for each in open_ones.values()}:
        mine = [each for each in given if open_ones[each.step.rollout_id].channel == channel]
        database.count(channel, _tallies(mine, [each.node for each in mine if each.node is not None]))
    return True


def _tallies(given: Sequence[Append], nodes: Sequence[Node]) -> list[Tally]:
    """What these steps and new nodes add to the running counts of their channel."""
    return [
        Tally("count", "steps", len(given)),
        Tally("count", "tokens", sum(len(each.step.completion_ids) for each in given)),
        Tally("top", "version", max(each.versions.newest for each in given)),
        *([Tally("count", "prompt_tokens", sum(len(node.token_ids) for node in nodes))] if nodes else []),
        *(Tally("break", reason, n) for reason, n in Counter(node.reason for node in nodes if node.reason is not None).items()),
    ]
