"""A pool that forgets: dictionaries, for tests and for runs that nobody resumes."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.pool import rules
from penstock.pool.base import Bound, Change, Kind, Pool, PoolStats
from penstock.pool.leases import Beat, Clock, LeaseClock
from penstock.pool.rows import AttemptRows, Ending, Row, build_attempt, grade_key, mark_key, pack_message, seal, unseal
from penstock.pool.rules import State, Trained
from penstock.records import Attempt, End, Grade, Group, Lease, Mark, Node, Rollout, Step, Task


def open_pool(folder: Path, *, url: str = "", clock: Clock = time.monotonic) -> Pool:
    """A new, empty pool; `folder` is ignored."""
    return MemoryPool(clock)


@dataclass(slots=True)
class _Entry:
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
    newest: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    breaks: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class _Group:
    """What is kept of one group."""

    id: str
    seq: int
    channel: str
    task: Row
    current: dict[int, _Entry]
    """Per place the attempt that counts."""
    min_size: int = 0
    state: State = State.OPEN
    lease_id: str | None = None
    """The last lease that held it."""
    trained: Trained | None = None


@dataclass(slots=True)
class _Lease:
    groups: list[_Group]
    beat: Beat
    open: bool = True


class MemoryPool:
    """The contract of `Pool` without a disk. Records are sealed as on a disk, so it keeps and refuses the same ones."""

    def __init__(self, clock: Clock) -> None:
        self._groups: dict[str, _Group] = {}
        self._entries: dict[str, _Entry] = {}
        self._leases: dict[str, _Lease] = {}
        self._ledger: list[tuple[str, int]] = []
        self._unreported: Counter[str] = Counter()
        self._clock = LeaseClock(clock)
        self._changes: list[Change] = []
        self._changed = asyncio.Event()
        self._drops: Counter[tuple[str, str]] = Counter()

    async def open_group(
        self, task: Task, rollouts: Sequence[Rollout], *, seq: int | None, min_size: int = 0, bound: Bound | None = None
    ) -> None:
        """See `Pool.open_group`."""
        group_id = rules.check_group(task, rollouts)
        if group_id in self._groups:
            return
        if known := [r.id for r in rollouts if r.id in self._entries]:
            raise rules.taken(known[0])
        sealed = seal(task, f"task {task.id!r}")
        entries = [_Entry(rollout, seal(rollout, f"rollout {rollout.id!r}")) for rollout in rollouts]
        places, channel = {entry.rollout.place: entry for entry in entries}, rollouts[0].channel
        self._make_room(channel, bound)
        if seq is None:
            seq = max((group.seq for group in self._groups.values() if group.channel == channel), default=-1) + 1
        self._groups[group_id] = _Group(group_id, seq, channel, sealed, places, min_size)
        self._entries |= {entry.rollout.id: entry for entry in entries}
        self._tell("opened", channel, group_id)

    async def replace(self, lost: Rollout, reason: str) -> Rollout:
        """See `Pool.replace`."""
        entry, successor = self._entry(lost.id), lost.successor
        if entry.rollout != lost:
            raise rules.differs(f"rollout {lost.id!r}")
        if successor.id in self._entries:
            return successor
        group = self._groups[lost.group_id]
        rules.check_replaceable(lost, entry.end, group.state, lent=group.lease_id is not None)
        await self.end(lost.id, End.LOST, reason)
        new = _Entry(successor, seal(successor, f"rollout {successor.id!r}"))
        group.current[lost.place] = self._entries[successor.id] = new
        group.state = State.OPEN
        return successor

    async def append(self, step: Step, node: Node | None) -> None:
        """See `Pool.append`."""
        rules.check_step(step, node)
        row, node_row = seal(step, rules.step_name(step)), node and seal(node, rules.node_name(node))
        entry = self._running(step.rollout_id, rules.step_name(step))
        if node is None and step.node not in entry.nodes:
            raise rules.missing_node(step)
        if node is not None and node.parent is not None and node.parent not in entry.steps:
            raise rules.missing_parent(node)
        if node is not None and entry.nodes.get(node.id, node_row) != node_row:
            raise rules.differs(rules.node_name(node))
        if entry.steps.get(step.index, row) != row:
            raise rules.differs(rules.step_name(step))
        if node is not None and node_row is not None and node.id not in entry.nodes:
            entry.nodes[node.id] = node_row
            entry.prompt_tokens += len(node.token_ids)
            entry.breaks.update([node.reason] if node.reason is not None else [])
        if step.index not in entry.steps:
            entry.steps[step.index] = row
            entry.tokens += len(step.completion_ids)
            versions = rules.version_span(step.versions)
            entry.oldest = rules.oldest_version((entry.oldest, versions.oldest))
            entry.newest = max(entry.newest, versions.newest)

    async def grade(self, grade: Grade) -> None:
        """See `Pool.grade`."""
        rules.check_grade(grade)
        self._store_grades(grade.rollout_id, [grade])

    async def mark(self, mark: Mark) -> bool:
        """See `Pool.mark`."""
        rules.check_mark(mark)
        entry, row = self._entry(mark.rollout_id), seal(mark, rules.mark_name(mark))
        if mark.step is not None and mark.step not in entry.steps:
            raise rules.missing_step(mark)
        entry.marks[mark_key(mark)] = row
        self._tell("marked", entry.rollout.channel, mark.rollout_id)
        return self._groups[entry.rollout.group_id].state in rules.UNCLAIMED

    async def drop(self, group_id: str, reason: str) -> bool:
        """See `Pool.drop`."""
        group = self._groups.get(group_id)
        if group is None:
            raise rules.unknown_group(group_id)
        if not rules.check_droppable(group_id, group.state):
            return False
        self._drop(group, reason)
        return True

    async def end(self, rollout_id: str, end: End, message: str = "", grades: Sequence[Grade] = ()) -> bool:
        """See `Pool.end`."""
        rules.check_grades(rollout_id, grades)
        self._store_grades(rollout_id, grades)
        entry = self._entry(rollout_id)
        if entry.end is not None:
            return False
        entry.end, entry.message = end, pack_message(message)
        group = self._groups[entry.rollout.group_id]
        self._tell("ended", entry.rollout.channel, rollout_id)
        ends = [place.end for place in group.current.values()]
        if None not in ends:
            group.state = State.SHORT if rules.is_short(ends.count(End.COMPLETED), group.min_size) else State.COMPLETE
        return True

    async def claim(self, count: int, *, channel: str = "train", version: int, max_staleness: int, lease_s: float) -> Lease | None:
        """See `Pool.claim`."""
        rules.check_claim(count, lease_s)
        self._expire()
        ready = [group for group in self._ordered(channel) if group.state is State.COMPLETE]
        for group in ready:
            oldest = rules.oldest_version(entry.oldest for entry in group.current.values())
            if rules.is_stale(oldest, version, max_staleness):
                group.state = State.STALE
                self._unreported[channel] += 1
                self._tell("stale", channel, group.id)
        chosen = [group for group in ready if group.state is State.COMPLETE][:count]
        if len(chosen) < count:
            return None
        return self._lend(chosen, Beat(uuid.uuid4().hex, 0, lease_s), self._unreported.pop(channel, 0))

    async def renew(self, lease_id: str, lease_s: float) -> None:
        """See `Pool.renew`."""
        rules.check_lease_time(lease_s)
        lease = self._lease(lease_id)
        self._expire()
        if not lease.open:
            raise rules.lease_is_over(lease_id)
        lease.beat = Beat(lease_id, lease.beat.number + 1, lease_s)
        self._clock.see(lease.beat)

    async def release(self, lease_id: str | None = None) -> None:
        """See `Pool.release`."""
        for lease in self._leases.values() if lease_id is None else [self._lease(lease_id)]:
            self._close(lease)

    async def ack(self, lease_id: str, policy_version: int) -> None:
        """See `Pool.ack`."""
        lease = self._lease(lease_id)
        taken = [group for group in lease.groups if self._acknowledges(group, lease_id, policy_version)]
        lease.open = False
        for group in taken:
            group.state, group.trained = State.TRAINED, Trained(lease_id, policy_version)
            self._ledger.append((group.id, policy_version))
            self._tell("trained", group.channel, group.id)

    async def attempt(self, rollout_id: str, *, first_step: int = 0, first_node: int = 0) -> Attempt:
        """See `Pool.attempt`."""
        return _read_attempt(self._entry(rollout_id), first_step=first_step, first_node=first_node)

    async def task(self, rollout_id: str) -> Task:
        """See `Pool.task`."""
        group = self._groups[self._entry(rollout_id).rollout.group_id]
        return unseal(Task, group.task, f"the task of rollout {rollout_id!r}")

    async def groups(self, channel: str, *, first_seq: int = 0, limit: int = 100) -> list[Group]:
        """See `Pool.groups`."""
        chosen = [group for group in self._ordered(channel) if group.seq >= first_seq]
        return [_read_group(group) for group in chosen[: max(limit, 0)]]

    async def rollouts(self, group_id: str) -> list[Rollout]:
        """See `Pool.rollouts`."""
        found = [entry.rollout for entry in self._entries.values() if entry.rollout.group_id == group_id]
        return sorted(found, key=lambda rollout: (rollout.place, rollout.attempt))

    async def channels(self) -> list[str]:
        """See `Pool.channels`."""
        return sorted({group.channel for group in self._groups.values()})

    async def unfinished(self, channel: str) -> list[Group]:
        """See `Pool.unfinished`."""
        return [_read_group(group) for group in self._ordered(channel) if group.state in (State.OPEN, State.SHORT)]

    async def trained(self) -> list[tuple[str, int]]:
        """See `Pool.trained`."""
        return list(self._ledger)

    async def stats(self, channel: str | None = None) -> PoolStats:
        """See `Pool.stats`."""
        groups = [group for group in self._groups.values() if channel in (None, group.channel)]
        entries = [entry for entry in self._entries.values() if channel in (None, entry.rollout.channel)]
        states = Counter(group.state for group in groups)
        versions = [entry.newest for entry in entries] + [group.trained.version for group in groups if group.trained]
        return PoolStats(
            groups=len(groups),
            groups_complete=len(groups) - states[State.OPEN],
            groups_leased=states[State.LEASED],
            groups_trained=states[State.TRAINED],
            groups_stale=states[State.STALE],
            groups_short=states[State.SHORT],
            groups_dropped=states[State.DROPPED],
            rollouts=len(entries),
            steps=sum(len(entry.steps) for entry in entries),
            tokens=sum(entry.tokens for entry in entries),
            prompt_tokens=sum(entry.prompt_tokens for entry in entries),
            ends=dict(Counter(str(entry.end) for entry in entries if entry.end is not None)),
            drops=_by_reason(self._drops, channel),
            breaks=dict(sum((entry.breaks for entry in entries), Counter[str]())),
            last_seq=max((group.seq for group in groups), default=-1),
            last_version=max(versions, default=0),
        )

    async def changes(self, after: int = 0, *, limit: int = 1000) -> list[Change]:
        """See `Pool.changes`."""
        return self._changes[max(after, 0) :][: max(limit, 0)]

    async def position(self) -> int:
        """See `Pool.position`."""
        return len(self._changes)

    async def wait(self, after: int, *, timeout_s: float) -> bool:
        """See `Pool.wait`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self._changes) <= after:
                    self._changed.clear()
                    await self._changed.wait()
        return len(self._changes) > after

    async def close(self) -> None:
        """Nothing is held."""

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
        waiting = [group for group in self._ordered(channel) if group.state in rules.WAITING]
        if bound is None or len(waiting) < bound.groups:
            return
        complete = [group for group in waiting if group.state is State.COMPLETE]
        if bound.overflow == "refuse" or not complete:
            raise rules.full(channel, bound)
        self._drop(complete[0], rules.OVERFLOW)

    def _drop(self, group: _Group, reason: str) -> None:
        group.state = State.DROPPED
        self._drops[group.channel, reason] += 1
        self._tell("dropped", group.channel, group.id)

    def _ordered(self, channel: str) -> list[_Group]:
        return sorted(
            (group for group in self._groups.values() if group.channel == channel), key=lambda group: (group.seq, group.id)
        )

    def _entry(self, rollout_id: str) -> _Entry:
        if rollout_id not in self._entries:
            raise rules.unknown_rollout(rollout_id)
        return self._entries[rollout_id]

    def _running(self, rollout_id: str, name: str) -> _Entry:
        entry = self._entry(rollout_id)
        if entry.end is not None:
            raise rules.too_late(name, entry.end)
        return entry

    def _lease(self, lease_id: str) -> _Lease:
        if lease_id not in self._leases:
            raise rules.unknown_lease(lease_id)
        return self._leases[lease_id]

    def _lend(self, groups: list[_Group], beat: Beat, stale: int) -> Lease:
        self._leases[beat.lease_id] = _Lease(groups, beat)
        self._clock.see(beat)
        for group in groups:
            group.state, group.lease_id = State.LEASED, beat.lease_id
            self._tell("lent", group.channel, group.id)
        return Lease(id=beat.lease_id, groups=tuple(map(_read_group, groups)), stale=stale)

    def _acknowledges(self, group: _Group, lease_id: str, version: int) -> bool:
        holder = group.lease_id if group.state is State.LEASED else None
        return rules.acknowledges(group.id, lease_id, version, holder=holder, trained=group.trained)

    def _expire(self) -> None:
        for lease_id in self._clock.expired(lease.beat for lease in self._leases.values() if lease.open):
            self._close(self._leases[lease_id])

    def _close(self, lease: _Lease) -> None:
        lease.open = False
        for group in lease.groups:
            if group.state is State.LEASED and group.lease_id == lease.beat.lease_id:
                group.state = State.COMPLETE
                self._tell("returned", group.channel, group.id)


def _by_reason(drops: Counter[tuple[str, str]], channel: str | None) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (where, reason), n in drops.items():
        found[reason] += n if channel in (None, where) else 0
    return dict(+found)


def _read_attempt(entry: _Entry, *, first_step: int = 0, first_node: int = 0) -> Attempt:
    wanted = ((entry.nodes, first_node), (entry.steps, first_step))
    nodes, steps = ([rows[index] for index in sorted(rows) if index >= first] for rows, first in wanted)
    ending, marks = Ending(entry.end, entry.message), [entry.marks[key] for key in sorted(entry.marks)]
    return build_attempt(entry.rollout.id, AttemptRows(entry.row, ending, nodes, steps, entry.grades.values(), marks))


def _read_group(group: _Group) -> Group:
    attempts = tuple(_read_attempt(group.current[place]) for place in sorted(group.current))
    task = unseal(Task, group.task, f"the task of group {group.id!r}")
    return Group(id=group.id, seq=group.seq, task=task, channel=group.channel, attempts=attempts)
