"""A model of the pool in plain dictionaries, which `test_pool_model` compares the real ones with."""

import asyncio
import uuid
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock.pool import rules
from penstock.pool.base import Change, ChangeKind, GroupLimit, PoolStats
from penstock.pool.rows import (
    RecordRow,
    RolloutRows,
    StoredEnd,
    build_rollout,
    decode_row,
    encode_row,
    grade_key,
    mark_key,
    pack_message,
)
from penstock.pool.rules import Clock, GroupState, LeaseClock, LedgerEntry, OpenLease, sum_counters
from penstock.records import End, Grade, Group, Lease, Mark, Node, Rollout, RolloutRef, Step, Task


@dataclass(slots=True)
class MemoryRollout:
    """One rollout, as encoded rows."""

    rollout: RolloutRef
    row: RecordRow
    end: End | None = None
    message: bytes = b""
    nodes: dict[int, RecordRow] = field(default_factory=dict[int, RecordRow])
    steps: dict[int, RecordRow] = field(default_factory=dict[int, RecordRow])
    grades: dict[bytes, RecordRow] = field(default_factory=dict[bytes, RecordRow])
    marks: dict[int, RecordRow] = field(default_factory=dict[int, RecordRow])
    oldest: int | None = None

    def read(self, *, first_step: int = 0, first_node: int = 0) -> Rollout:
        numbered = ((self.nodes, first_node), (self.steps, first_step))
        nodes, steps = ([rows[index] for index in sorted(rows) if index >= first] for rows, first in numbered)
        end, marks = StoredEnd(self.end, self.message), [self.marks[key] for key in sorted(self.marks)]
        return build_rollout(self.rollout.id, RolloutRows(self.row, end, nodes, steps, self.grades.values(), marks))


@dataclass(slots=True)
class MemoryGroup:
    id: str
    seq: int
    channel: str
    task: RecordRow
    current: dict[int, MemoryRollout]
    """By place: the last attempt, which counts."""
    rollouts: list[RolloutRef]
    """All attempts, replaced ones included."""
    min_size: int = 0
    state: GroupState = GroupState.OPEN
    """Changed by `ChannelGroups.move` only."""
    oldest: int | None = None
    """The oldest policy version on a token that counts; set once every place has ended."""
    lease_id: str | None = None
    """The last lease that held it."""
    trained: LedgerEntry | None = None

    def read(self) -> Group:
        attempts = tuple(self.current[place].read() for place in sorted(self.current))
        task = decode_row(Task, self.task, f"the task of group {self.id!r}")
        return Group(id=self.id, seq=self.seq, task=task, channel=self.channel, rollouts=attempts)


class ChannelGroups:
    """The groups of one channel, indexed by order and by state."""

    def __init__(self) -> None:
        self._ordered: list[MemoryGroup] = []
        self._by_state: dict[GroupState, dict[str, MemoryGroup]] = {state: {} for state in GroupState}

    @property
    def next_seq(self) -> int:
        return self._ordered[-1].seq + 1 if self._ordered else 0

    def add(self, group: MemoryGroup) -> None:
        insort(self._ordered, group, key=_order)
        self._by_state[group.state][group.id] = group

    def remove(self, group: MemoryGroup) -> None:
        del self._ordered[bisect_left(self._ordered, _order(group), key=_order)]
        del self._by_state[group.state][group.id]

    def move(self, group: MemoryGroup, state: GroupState) -> None:
        del self._by_state[group.state][group.id]
        group.state = state
        self._by_state[state][group.id] = group

    def in_state(self, *states: GroupState) -> list[MemoryGroup]:
        """Return the groups in one of these states, in order."""
        return sorted((group for state in states for group in self._by_state[state].values()), key=_order)

    def count(self, *states: GroupState) -> int:
        return sum(len(self._by_state[state]) for state in states)

    def from_seq(self, first_seq: int) -> Iterator[MemoryGroup]:
        return islice(self._ordered, bisect_left(self._ordered, first_seq, key=lambda group: group.seq), None)


def _order(group: MemoryGroup) -> tuple[int, str]:
    return group.seq, group.id


@dataclass(slots=True)
class _MemoryLease:
    groups: list[MemoryGroup]
    open: OpenLease


class DictPool:
    """Implements what the comparison needs of `Pool`. Records are encoded as on disk, so it refuses the same ones."""

    def __init__(self, clock: Clock) -> None:
        self._groups: dict[str, MemoryGroup] = {}
        self._channels: dict[str, ChannelGroups] = {}
        self._rollouts: dict[str, MemoryRollout] = {}
        self._leases: dict[str, _MemoryLease] = {}
        self._open_leases: dict[str, _MemoryLease] = {}
        self._ledger: list[tuple[str, int]] = []
        self._unreported: Counter[str] = Counter()
        self._clock = LeaseClock(clock)
        self._changes: list[Change] = []
        self._changed = asyncio.Event()
        self._counters: dict[tuple[str, str, str], int] = {}
        """By channel, kind and name; see `sum_counters`."""

    async def open_group(
        self, task: Task, rollouts: Sequence[RolloutRef], *, seq: int | None, min_size: int = 0, limit: GroupLimit | None = None
    ) -> None:
        group_id = rules.check_group(task, rollouts)
        if group_id in self._groups:
            return
        if known := [r.id for r in rollouts if r.id in self._rollouts]:
            raise rules.rollout_taken(known[0])
        task_row = encode_row(task, f"task {task.id!r}")
        entries = [MemoryRollout(rollout, encode_row(rollout, f"rollout {rollout.id!r}")) for rollout in rollouts]
        places, channel = {entry.rollout.place: entry for entry in entries}, rollouts[0].channel
        groups = self._channels.setdefault(channel, ChannelGroups())
        self._make_room(channel, limit)
        number = groups.next_seq if seq is None else seq
        group = self._groups[group_id] = MemoryGroup(group_id, number, channel, task_row, places, list(rollouts), min_size)
        groups.add(group)
        self._rollouts.update((entry.rollout.id, entry) for entry in entries)
        self._count(channel, "count", "rollouts", len(entries))
        self._count(channel, "top", "seq", number)
        self._log_change("opened", channel, group_id)

    async def replace(self, lost: RolloutRef, reason: str) -> RolloutRef:
        entry, successor = self._rollout(lost.id), lost.successor
        if entry.rollout != lost:
            raise rules.conflict(f"rollout {lost.id!r}")
        if successor.id in self._rollouts:
            return successor
        group = self._groups[lost.group_id]
        rules.check_replaceable(lost, entry.end, group.state, was_leased=group.lease_id is not None)
        await self.end(lost.id, End.LOST, reason)
        new = MemoryRollout(successor, encode_row(successor, f"rollout {successor.id!r}"))
        group.current[lost.place] = self._rollouts[successor.id] = new
        group.rollouts.append(successor)
        self._count(group.channel, "count", "rollouts", 1)
        self._move(group, GroupState.OPEN)
        return successor

    async def append(self, step: Step, node: Node | None) -> None:
        rules.check_step(step, node)
        name, node_name = rules.step_name(step.rollout_id, step.index), rules.node_name(step.rollout_id, step.node)
        row, node_row = encode_row(step, name), node and encode_row(node, node_name)
        entry = self._running(step.rollout_id, name)
        channel = entry.rollout.channel
        if node is None and step.node not in entry.nodes:
            raise rules.missing_node(step.rollout_id, step.index, step.node)
        if node is not None and node.parent is not None and node.parent not in entry.steps:
            raise rules.missing_parent(node.rollout_id, node.id, node.parent)
        if node is not None and entry.nodes.get(node.id, node_row) != node_row:
            raise rules.conflict(node_name)
        if entry.steps.get(step.index, row) != row:
            raise rules.conflict(name)
        if node is not None and node_row is not None and node.id not in entry.nodes:
            entry.nodes[node.id] = node_row
            self._count(channel, "count", "prompt_tokens", len(node.token_ids))
            if node.reason is not None:
                self._count(channel, "break", node.reason, 1)
        if step.index not in entry.steps:
            entry.steps[step.index] = row
            versions = rules.version_range(step.versions)
            entry.oldest = rules.oldest_version((entry.oldest, versions.oldest))
            self._count(channel, "count", "steps", 1)
            self._count(channel, "count", "tokens", len(step.completion_ids))
            self._count(channel, "top", "version", versions.newest)

    async def grade(self, grade: Grade) -> None:
        rules.check_grade(grade)
        self._store_grades(grade.rollout_id, [grade])

    async def mark(self, mark: Mark) -> bool:
        rules.check_mark(mark)
        entry, row = self._rollout(mark.rollout_id), encode_row(mark, rules.mark_name(mark))
        if mark.step is not None and mark.step not in entry.steps:
            raise rules.missing_step(mark)
        entry.marks[mark_key(mark)] = row
        self._log_change("marked", entry.rollout.channel, mark.rollout_id)
        return self._groups[entry.rollout.group_id].state in rules.UNCLAIMED

    async def drop(self, group_id: str, reason: str) -> bool:
        group = self._groups.get(group_id)
        if group is None:
            raise rules.unknown_group(group_id)
        if not rules.check_droppable(group_id, group.state):
            return False
        self._drop(group, reason)
        return True

    async def end(
        self, rollout_id: str, end: End, message: str = "", grades: Sequence[Grade] = (), *, only_grades: bool = False
    ) -> bool:
        rules.check_grades(rollout_id, grades)
        running = self._rollout(rollout_id)
        if only_grades and running.end is None and running.grades:
            raise rules.graded_before(rollout_id)
        self._store_grades(rollout_id, grades)
        entry = self._rollout(rollout_id)
        if entry.end is not None:
            return False
        entry.end, entry.message = end, pack_message(message)
        group = self._groups[entry.rollout.group_id]
        self._count(group.channel, "end", str(end), 1)
        self._log_change("ended", group.channel, rollout_id)
        ends = [place.end for place in group.current.values()]
        if None not in ends:
            group.oldest = rules.oldest_version(place.oldest for place in group.current.values())
            self._move(group, GroupState.SHORT if ends.count(End.COMPLETED) < group.min_size else GroupState.COMPLETE)
        return True

    async def claim(self, count: int, *, channel: str = "train", version: int, max_staleness: int, lease_s: float) -> Lease | None:
        rules.check_claim(count, lease_s)
        self._expire()
        ready = self._groups_in(channel, GroupState.COMPLETE)
        for group in ready:
            if group.oldest is not None and group.oldest < version - max_staleness:
                self._move(group, GroupState.STALE)
                self._unreported[channel] += 1
                self._log_change("stale", channel, group.id)
        chosen = [group for group in ready if group.state is GroupState.COMPLETE][:count]
        if len(chosen) < count:
            return None
        return self._lease_out(chosen, OpenLease(uuid.uuid4().hex, 0, lease_s), self._unreported.pop(channel, 0))

    async def renew(self, lease_id: str, lease_s: float) -> None:
        rules.check_lease_time(lease_s)
        lease = self._lease(lease_id)
        self._expire()
        if lease_id not in self._open_leases:
            raise rules.lease_is_over(lease_id)
        lease.open = OpenLease(lease_id, lease.open.renewals + 1, lease_s)
        self._clock.start(lease.open)

    async def release(self, lease_id: str | None = None) -> None:
        for lease in list(self._open_leases.values()) if lease_id is None else [self._lease(lease_id)]:
            self._close_lease(lease)

    async def ack(self, lease_id: str, policy_version: int) -> None:
        lease = self._lease(lease_id)
        newly_trained = [group for group in lease.groups if self._acknowledges(group, lease_id, policy_version)]
        self._open_leases.pop(lease_id, None)
        for group in newly_trained:
            self._move(group, GroupState.TRAINED)
            group.trained = LedgerEntry(lease_id, policy_version)
            self._count(group.channel, "top", "version", policy_version)
            self._ledger.append((group.id, policy_version))
            self._log_change("trained", group.channel, group.id)

    async def rollout(self, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Rollout:
        return self._rollout(rollout_id).read(first_step=first_step, first_node=first_node)

    async def groups(self, channel: str, *, first_seq: int = 0, limit: int = 100) -> list[Group]:
        groups = self._channels.get(channel, ChannelGroups())
        return [group.read() for group in islice(groups.from_seq(first_seq), max(limit, 0))]

    async def unfinished(self, channel: str) -> list[Group]:
        return [group.read() for group in self._groups_in(channel, GroupState.OPEN, GroupState.SHORT)]

    async def trained(self) -> list[tuple[str, int]]:
        return list(self._ledger)

    async def stats(self, channel: str | None = None) -> PoolStats:
        chosen = [groups for name, groups in self._channels.items() if channel in (None, name)]
        states = [("state", str(state), groups.count(state)) for groups in chosen for state in GroupState]
        counts = [(kind, name, n) for (owner, kind, name), n in self._counters.items() if channel in (None, owner)]
        return sum_counters([*states, *counts])

    async def changes(self, after: int = 0, *, limit: int = 1000) -> list[Change]:
        return self._changes[max(after, 0) :][: max(limit, 0)]

    def _log_change(self, kind: ChangeKind, channel: str, name: str) -> None:
        self._changes.append(Change(len(self._changes) + 1, kind, channel, name))

    def _store_grades(self, rollout_id: str, grades: Sequence[Grade]) -> None:
        entry = self._rollout(rollout_id)
        stored = dict(entry.grades)
        for grade in grades:
            name = rules.grade_name(grade)
            row = encode_row(grade, name)
            self._running(rollout_id, name)
            if stored.setdefault(grade_key(grade), row) != row:
                raise rules.conflict(name)
        for _ in range(len(stored) - len(entry.grades)):
            self._log_change("graded", entry.rollout.channel, rollout_id)
        entry.grades = stored

    def _make_room(self, channel: str, limit: GroupLimit | None) -> None:
        if limit is None or self._channels[channel].count(*rules.WAITING) < limit.groups:
            return
        complete = self._groups_in(channel, GroupState.COMPLETE)
        if limit.overflow == "refuse" or not complete:
            raise rules.pool_full(channel, limit)
        self._drop(complete[0], rules.OVERFLOW)

    def _drop(self, group: MemoryGroup, reason: str) -> None:
        self._move(group, GroupState.DROPPED)
        self._count(group.channel, "drop", reason, 1)
        self._log_change("dropped", group.channel, group.id)

    def _groups_in(self, channel: str, *states: GroupState) -> list[MemoryGroup]:
        return self._channels[channel].in_state(*states) if channel in self._channels else []

    def _move(self, group: MemoryGroup, state: GroupState) -> None:
        self._channels[group.channel].move(group, state)

    def _count(self, channel: str, kind: str, name: str, n: int) -> None:
        known = self._counters.get((channel, kind, name), 0)
        self._counters[channel, kind, name] = max(known, n) if kind == "top" else known + n

    def _rollout(self, rollout_id: str) -> MemoryRollout:
        if rollout_id not in self._rollouts:
            raise rules.unknown_rollout(rollout_id)
        return self._rollouts[rollout_id]

    def _running(self, rollout_id: str, name: str) -> MemoryRollout:
        entry = self._rollout(rollout_id)
        if entry.end is not None:
            raise rules.too_late(name, entry.end)
        return entry

    def _lease(self, lease_id: str) -> _MemoryLease:
        if lease_id not in self._leases:
            raise rules.unknown_lease(lease_id)
        return self._leases[lease_id]

    def _lease_out(self, groups: list[MemoryGroup], lease: OpenLease, stale: int) -> Lease:
        self._leases[lease.lease_id] = self._open_leases[lease.lease_id] = _MemoryLease(groups, lease)
        self._clock.start(lease)
        for group in groups:
            self._move(group, GroupState.LEASED)
            group.lease_id = lease.lease_id
            self._log_change("lent", group.channel, group.id)
        return Lease(id=lease.lease_id, groups=tuple(group.read() for group in groups), stale=stale)

    def _acknowledges(self, group: MemoryGroup, lease_id: str, version: int) -> bool:
        holder = group.lease_id if group.state is GroupState.LEASED else None
        return rules.check_acknowledgement(group.id, lease_id, version, holder=holder, trained=group.trained)

    def _expire(self) -> None:
        for lease_id in self._clock.expired(lease.open for lease in self._open_leases.values()):
            self._close_lease(self._leases[lease_id])

    def _close_lease(self, lease: _MemoryLease) -> None:
        self._open_leases.pop(lease.open.lease_id, None)
        for group in lease.groups:
            if group.state is GroupState.LEASED and group.lease_id == lease.open.lease_id:
                self._move(group, GroupState.COMPLETE)
                self._log_change("returned", group.channel, group.id)
