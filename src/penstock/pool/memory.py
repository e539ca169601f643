"""What the memory pool keeps of rollouts and groups, and where it finds them again without looking at all of them."""

import asyncio
import time
import uuid
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from penstock.pool import rules
from penstock.pool.base import Bound, Change, Kind, Pool, PoolStats
from penstock.pool.leases import Beat, Clock, LeaseClock
from penstock.pool.rows import AttemptRows, Ending, Row, build_attempt, grade_key, mark_key, pack_message, seal, unseal
from penstock.pool.rules import State, Trained, add_up
from penstock.records import Attempt, End, Grade, Group, Lease, Mark, Node, Rollout, Step, Task


@dataclass(slots=True)
class KeptRollout:
    """What is kept of one rollout."""

    rollout: Rollout
    row: Row
    end: End | None = None
    message: bytes = b""
    nodes: dict[int, Row] = field(default_factory=dict[int, Row])
    steps: dict[int, Row] = field(default_factory=dict[int, Row])
    grades: dict[bytes, Row] = field(default_factory=dict[bytes, Row])
    marks: dict[int, Row] = field(default_factory=dict[int, Row])
    oldest: int | None = None

    def read(self, *, first_step: int = 0, first_node: int = 0) -> Attempt:
        """All of it, or its steps and nodes from these numbers on."""
        wanted = ((self.nodes, first_node), (self.steps, first_step))
        nodes, steps = ([rows[index] for index in sorted(rows) if index >= first] for rows, first in wanted)
        ending, marks = Ending(self.end, self.message), [self.marks[key] for key in sorted(self.marks)]
        return build_attempt(self.rollout.id, AttemptRows(self.row, ending, nodes, steps, self.grades.values(), marks))


@dataclass(slots=True)
class KeptGroup:
    """What is kept of one group."""

    id: str
    seq: int
    channel: str
    task: Row
    current: dict[int, KeptRollout]
    """Per place the attempt that counts."""
    rollouts: list[Rollout]
    """All attempts."""
    min_size: int = 0
    state: State = State.OPEN
    """`Shelf.move` changes it."""
    oldest: int | None = None
    """The oldest version on a token that counts, once it is complete."""
    lease_id: str | None = None
    """The last lease that held it."""
    trained: Trained | None = None

    def read(self) -> Group:
        """The group with the attempts that count."""
        attempts = tuple(self.current[place].read() for place in sorted(self.current))
        task = unseal(Task, self.task, f"the task of group {self.id!r}")
        return Group(id=self.id, seq=self.seq, task=task, channel=self.channel, attempts=attempts)


class MemoryTable:
    """The groups of one channel, in their order and by their states."""

    def __init__(self) -> None:
        self._ordered: list[KeptGroup] = []
        self._at: dict[State, dict[str, KeptGroup]] = {state: {} for state in State}

    @property
    def next_seq(self) -> int:
        """The number after the highest."""
        return self._ordered[-1].seq + 1 if self._ordered else 0

    def add(self, group: KeptGroup) -> None:
        """Put a new one in its place."""
        insort(self._ordered, group, key=_order)
        self._at[group.state][group.id] = group

    def remove(self, group: KeptGroup) -> None:
        del self._ordered[bisect_left(self._ordered, _order(group), key=_order)]
        del self._at[group.state][group.id]

    def move(self, group: KeptGroup, state: State) -> None:
        """Let it stand there from now on."""
        del self._at[group.state][group.id]
        group.state = state
        self._at[state][group.id] = group

    def at(self, *states: State) -> list[KeptGroup]:
        """Those in one of these states, in their order."""
        return sorted((group for state in states for group in self._at[state].values()), key=_order)

    def count(self, *states: State) -> int:
        """How many those are."""
        return sum(len(self._at[state]) for state in states)

    def after(self, first_seq: int) -> Iterator[KeptGroup]:
        """Those from a number on, in their order."""
        return islice(self._ordered, bisect_left(self._ordered, first_seq, key=lambda group: group.seq), None)


def _order(group: KeptGroup) -> tuple[int, str]:
    return group.seq, group.id


def open_pool(folder: Path, *, url: str = "", clock: Clock = time.monotonic) -> Pool:
    """A new, empty pool; `folder` is ignored."""
    return MemoryPool(clock)


@dataclass(slots=True)
class _Lease:
    groups: list[KeptGroup]
    beat: Beat


class MemoryPool:
    """The contract of `Pool` without a disk. Records are sealed as on a disk, so it keeps and refuses the same ones."""

    def __init__(self, clock: Clock) -> None:
        self._groups: dict[str, KeptGroup] = {}
        self._shelves: dict[str, MemoryTable] = {}
        """By channel."""
        self._entries: dict[str, KeptRollout] = {}
        self._leases: dict[str, _Lease] = {}
        self._open_leases: dict[str, _Lease] = {}
        self._ledger: list[tuple[str, int]] = []
        self._unreported: Counter[str] = Counter()
        self._clock = LeaseClock(clock)
        self._changes: list[Change] = []
        self._changed = asyncio.Event()
        self._tallies: dict[tuple[str, str, str], int] = {}
        """Running counts by channel, kind and name, as `tallies.add_up` takes them."""

    async def open_group(
        self, task: Task, rollouts: Sequence[Rollout], *, seq: int | None, min_size: int = 0, bound: Bound | None = None
    ) -> None:
        group_id = rules.check_group(task, rollouts)
        if group_id in self._groups:
            return
        if known := [r.id for r in rollouts if r.id in self._entries]:
            raise rules.taken(known[0])
        sealed = seal(task, f"task {task.id!r}")
        entries = [KeptRollout(rollout, seal(rollout, f"rollout {rollout.id!r}")) for rollout in rollouts]
        places, channel = {entry.rollout.place: entry for entry in entries}, rollouts[0].channel
        shelf = self._shelves.setdefault(channel, MemoryTable())
        self._make_room(channel, bound)
        number = shelf.next_seq if seq is None else seq
        group = self._groups[group_id] = KeptGroup(group_id, number, channel, sealed, places, list(rollouts), min_size)
        shelf.add(group)
        self._entries.update((entry.rollout.id, entry) for entry in entries)
        self._count(channel, "count", "rollouts", len(entries))
        self._count(channel, "top", "seq", number)
        self._tell("opened", channel, group_id)

    async def replace(self, lost: Rollout, reason: str) -> Rollout:
        entry, successor = self._entry(lost.id), lost.successor
        if entry.rollout != lost:
            raise rules.differs(f"rollout {lost.id!r}")
        if successor.id in self._entries:
            return successor
        group = self._groups[lost.group_id]
        rules.check_replaceable(lost, entry.end, group.state, lent=group.lease_id is not None)
        await self.end(lost.id, End.LOST, reason)
        new = KeptRollout(successor, seal(successor, f"rollout {successor.id!r}"))
        group.current[lost.place] = self._entries[successor.id] = new
        group.rollouts.append(successor)
        self._count(group.channel, "count", "rollouts", 1)
        self._move(group, State.OPEN)
        return successor

    async def append(self, step: Step, node: Node | None) -> None:
        rules.check_step(step, node)
        name, node_name = rules.step_name(step.rollout_id, step.index), rules.node_name(step.rollout_id, step.node)
        row, node_row = seal(step, name), node and seal(node, node_name)
        entry = self._running(step.rollout_id, name)
        channel = entry.rollout.channel
        if node is None and step.node not in entry.nodes:
            raise rules.missing_node(step.rollout_id, step.index, step.node)
        if node is not None and node.parent is not None and node.parent not in entry.steps:
            raise rules.missing_parent(node.rollout_id, node.id, node.parent)
        if node is not None and entry.nodes.get(node.id, node_row) != node_row:
            raise rules.differs(node_name)
        if entry.steps.get(step.index, row) != row:
            raise rules.differs(name)
        if node is not None and node_row is not None and node.id not in entry.nodes:
            entry.nodes[node.id] = node_row
            self._count(channel, "count", "prompt_tokens", len(node.token_ids))
            if node.reason is not None:
                self._count(channel, "break", node.reason, 1)
        if step.index not in entry.steps:
            entry.steps[step.index] = row
            versions = rules.version_span(step.versions)
            entry.oldest = rules.oldest_version((entry.oldest, versions.oldest))
            self._count(channel, "count", "steps", 1)
            self._count(channel, "count", "tokens", len(step.completion_ids))
            self._count(channel, "top", "version", versions.newest)

    async def grade(self, grade: Grade) -> None:
        rules.check_grade(grade)
        self._store_grades(grade.rollout_id, [grade])

    async def mark(self, mark: Mark) -> bool:
        rules.check_mark(mark)
        entry, row = self._entry(mark.rollout_id), seal(mark, rules.mark_name(mark))
        if mark.step is not None and mark.step not in entry.steps:
            raise rules.missing_step(mark)
        entry.marks[mark_key(mark)] = row
        self._tell("marked", entry.rollout.channel, mark.rollout_id)
        return self._groups[entry.rollout.group_id].state in rules.UNCLAIMED

    async def drop(self, group_id: str, reason: str) -> bool:
        group = self._groups.get(group_id)
        if group is None:
            raise rules.unknown_group(group_id)
        if not rules.check_droppable(group_id, group.state):
            return False
        self._drop(group, reason)
        return True

    async def end(self, rollout_id: str, end: End, message: str = "", grades: Sequence[Grade] = ()) -> bool:
        rules.check_grades(rollout_id, grades)
        self._store_grades(rollout_id, grades)
        entry = self._entry(rollout_id)
        if entry.end is not None:
            return False
        entry.end, entry.message = end, pack_message(message)
        group = self._groups[entry.rollout.group_id]
        self._count(group.channel, "end", str(end), 1)
        self._tell("ended", group.channel, rollout_id)
        ends = [place.end for place in group.current.values()]
        if None not in ends:
            group.oldest = rules.oldest_version(place.oldest for place in group.current.values())
            self._move(group, State.SHORT if rules.is_short(ends.count(End.COMPLETED), group.min_size) else State.COMPLETE)
        return True

    async def claim(self, count: int, *, channel: str = "train", version: int, max_staleness: int, lease_s: float) -> Lease | None:
        rules.check_claim(count, lease_s)
        self._expire()
        ready = self._at(channel, State.COMPLETE)
        for group in ready:
            if rules.is_stale(group.oldest, version, max_staleness):
                self._move(group, State.STALE)
                self._unreported[channel] += 1
                self._tell("stale", channel, group.id)
        chosen = [group for group in ready if group.state is State.COMPLETE][:count]
        if len(chosen) < count:
            return None
        return self._lend(chosen, Beat(uuid.uuid4().hex, 0, lease_s), self._unreported.pop(channel, 0))

    async def renew(self, lease_id: str, lease_s: float) -> None:
        rules.check_lease_time(lease_s)
        lease = self._lease(lease_id)
        self._expire()
        if lease_id not in self._open_leases:
            raise rules.lease_is_over(lease_id)
        lease.beat = Beat(lease_id, lease.beat.number + 1, lease_s)
        self._clock.see(lease.beat)

    async def release(self, lease_id: str | None = None) -> None:
        for lease in list(self._open_leases.values()) if lease_id is None else [self._lease(lease_id)]:
            self._close(lease)

    async def ack(self, lease_id: str, policy_version: int) -> None:
        lease = self._lease(lease_id)
        taken = [group for group in lease.groups if self._acknowledges(group, lease_id, policy_version)]
        self._open_leases.pop(lease_id, None)
        for group in taken:
            self._move(group, State.TRAINED)
            group.trained = Trained(lease_id, policy_version)
            self._count(group.channel, "top", "version", policy_version)
            self._ledger.append((group.id, policy_version))
            self._tell("trained", group.channel, group.id)

    async def attempt(self, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Attempt:
        return self._entry(rollout_id).read(first_step=first_step, first_node=first_node)

    async def task(self, rollout_id: str) -> Task:
        group = self._groups[self._entry(rollout_id).rollout.group_id]
        return unseal(Task, group.task, f"the task of rollout {rollout_id!r}")

    async def groups(self, channel: str, *, first_seq: int = 0, limit: int = 100) -> list[Group]:
        shelf = self._shelves.get(channel, MemoryTable())
        return [group.read() for group in islice(shelf.after(first_seq), max(limit, 0))]

    async def rollouts(self, group_id: str) -> list[Rollout]:
        found = self._groups[group_id].rollouts if group_id in self._groups else []
        return sorted(found, key=lambda rollout: (rollout.place, rollout.attempt))

    async def channels(self) -> list[str]:
        return sorted(self._shelves)

    async def unfinished(self, channel: str) -> list[Group]:
        return [group.read() for group in self._at(channel, State.OPEN, State.SHORT)]

    async def trained(self) -> list[tuple[str, int]]:
        return list(self._ledger)

    async def stats(self, channel: str | None = None) -> PoolStats:
        shelves = [shelf for name, shelf in self._shelves.items() if channel in (None, name)]
        states = [("state", str(state), shelf.count(state)) for shelf in shelves for state in State]
        counts = [(kind, name, n) for (where, kind, name), n in self._tallies.items() if channel in (None, where)]
        return add_up([*states, *counts])

    async def changes(self, after: int = 0, *, limit: int = 1000) -> list[Change]:
        return self._changes[max(after, 0) :][: max(limit, 0)]

    async def position(self) -> int:
        return len(self._changes)

    async def wait(self, after: int, *, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self._changes) <= after:
                    self._changed.clear()
                    await self._changed.wait()
        return len(self._changes) > after

    async def close(self) -> None: ...

    def _tell(self, kind: Kind, channel: str, name: str) -> None:
        self._changes.append(Change(len(self._changes) + 1, kind, channel, name))
        self._changed.set()

    def _store_grades(self, rollout_id: str, grades: Sequence[Grade]) -> None:
        """All or none of them."""
        entry = self._entry(rollout_id)
        stored = dict(entry.grades)
        for grade in grades:
            name = rules.grade_name(grade)
            row = seal(grade, name)
            self._running(rollout_id, name)
            if stored.setdefault(grade_key(grade), row) != row:
                raise rules.differs(name)
        for _ in range(len(stored) - len(entry.grades)):
            self._tell("graded", entry.rollout.channel, rollout_id)
        entry.grades = stored

    def _make_room(self, channel: str, bound: Bound | None) -> None:
        """Refuse one group more, or drop the oldest for it."""
        if bound is None or self._shelves[channel].count(*rules.WAITING) < bound.groups:
            return
        complete = self._at(channel, State.COMPLETE)
        if bound.overflow == "refuse" or not complete:
            raise rules.full(channel, bound)
        self._drop(complete[0], rules.OVERFLOW)

    def _drop(self, group: KeptGroup, reason: str) -> None:
        self._move(group, State.DROPPED)
        self._count(group.channel, "drop", reason, 1)
        self._tell("dropped", group.channel, group.id)

    def _at(self, channel: str, *states: State) -> list[KeptGroup]:
        return self._shelves[channel].at(*states) if channel in self._shelves else []

    def _move(self, group: KeptGroup, state: State) -> None:
        self._shelves[group.channel].move(group, state)

    def _count(self, channel: str, kind: str, name: str, n: int) -> None:
        known = self._tallies.get((channel, kind, name), 0)
        self._tallies[channel, kind, name] = max(known, n) if kind == "top" else known + n

    def _entry(self, rollout_id: str) -> KeptRollout:
        if rollout_id not in self._entries:
            raise rules.unknown_rollout(rollout_id)
        return self._entries[rollout_id]

    def _running(self, rollout_id: str, name: str) -> KeptRollout:
        entry = self._entry(rollout_id)
        if entry.end is not None:
            raise rules.too_late(name, entry.end)
        return entry

    def _lease(self, lease_id: str) -> _Lease:
        if lease_id not in self._leases:
            raise rules.unknown_lease(lease_id)
        return self._leases[lease_id]

    def _lend(self, groups: list[KeptGroup], beat: Beat, stale: int) -> Lease:
        self._leases[beat.lease_id] = self._open_leases[beat.lease_id] = _Lease(groups, beat)
        self._clock.see(beat)
        for group in groups:
            self._move(group, State.LEASED)
            group.lease_id = beat.lease_id
            self._tell("lent", group.channel, group.id)
        return Lease(id=beat.lease_id, groups=tuple(group.read() for group in groups), stale=stale)

    def _acknowledges(self, group: KeptGroup, lease_id: str, version: int) -> bool:
        holder = group.lease_id if group.state is State.LEASED else None
        return rules.acknowledges(group.id, lease_id, version, holder=holder, trained=group.trained)

    def _expire(self) -> None:
        for lease_id in self._clock.expired(lease.beat for lease in self._open_leases.values()):
            self._close(self._leases[lease_id])

    def _close(self, lease: _Lease) -> None:
        self._open_leases.pop(lease.beat.lease_id, None)
        for group in lease.groups:
            if group.state is State.LEASED and group.lease_id == lease.beat.lease_id:
                self._move(group, State.COMPLETE)
                self._tell("returned", group.channel, group.id)
