"""Rules that every pool shares: what it refuses, when a group is complete or stale, and when a lease expires."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from penstock.errors import PoolConflict, PoolError, PoolFull
from penstock.pool.base import GroupLimit, PoolStats
from penstock.records import End, Grade, Mark, Node, RolloutRef, Step, Task

Clock = Callable[[], float]


class GroupState(StrEnum):
    """The state of a group; `Pool.claim` takes complete ones only."""

    OPEN = "open"
    COMPLETE = "complete"
    LEASED = "leased"
    TRAINED = "trained"
    STALE = "stale"
    SHORT = "short"
    DROPPED = "dropped"


WAITING = (GroupState.OPEN, GroupState.SHORT, GroupState.COMPLETE, GroupState.LEASED)
"""Groups that are still to be trained."""
UNCLAIMED = (GroupState.OPEN, GroupState.SHORT, GroupState.COMPLETE)
"""Groups that no trainer holds or has used."""
OVERFLOW = "overflow"
"""Reason of a group that was dropped to make room."""


class LedgerEntry(NamedTuple):
    """The lease that a group was trained under, and the version that it was trained into."""

    lease_id: str
    version: int


def check_group(task: Task, rollouts: Sequence[RolloutRef]) -> str:
    """Return the id of the group that these rollouts form; PoolError if they do not form one."""
    if not rollouts:
        raise PoolError(f"a group for task {task.id!r} needs at least one rollout; give one per place")
    group_id = rollouts[0].group_id
    if len({(r.group_id, r.channel) for r in rollouts}) > 1 or any(r.task_id != task.id for r in rollouts):
        raise PoolError(f"group {group_id!r}: its rollouts must share one group id, channel and task {task.id!r}")
    if len({r.place for r in rollouts}) < len(rollouts) or len({r.id for r in rollouts}) < len(rollouts):
        raise PoolError(f"group {group_id!r}: two rollouts have the same place or id; number the places 0, 1, 2, …")
    return group_id


def check_step(step: Step, node: Node | None) -> None:
    """Refuse a step whose token columns differ in length, or a node that is not the step's own."""
    size, full_logprobs = len(step.completion_ids), step.full_logprobs
    lengths = [len(column) for column in (step.logprobs, step.versions, *([] if full_logprobs is None else [full_logprobs]))]
    lengths += [len(column) for column in (step.kept, step.most_likely) if column]
    if lengths.count(size) != len(lengths):
        problem = f"has {size} tokens but {lengths} log-probabilities, versions and so on; record one of each per token"
    elif not math.isfinite(sum(step.logprobs) + sum(full_logprobs or ())):
        problem = "has a log-probability that is not finite; no token is ever sampled at such odds, so look at the engine"
    elif node is not None and (node.rollout_id, node.id) != (step.rollout_id, step.node):
        problem = f"continues node {step.node}, but came with node {node.id} of rollout {node.rollout_id!r}"
    else:
        return
    raise PoolError(f"{step_name(step.rollout_id, step.index)} {problem}")


def check_grade(grade: Grade) -> None:
    """Refuse a reward that is not a finite number."""
    reward: Any = grade.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise PoolError(f"{grade_name(grade)} is {reward!r}; a reward must be a finite number")


def check_grades(rollout_id: str, grades: Sequence[Grade]) -> None:
    """Refuse grades of other rollouts, and rewards that are not finite."""
    for grade in grades:
        if grade.rollout_id != rollout_id:
            raise PoolError(f"{grade_name(grade)} came with the end of rollout {rollout_id!r}; give it to its own rollout")
        check_grade(grade)


def check_mark(mark: Mark) -> None:
    quality: Any = mark.quality
    if isinstance(quality, bool) or not isinstance(quality, int | float) or not math.isfinite(quality) or quality < 0:
        raise PoolError(f"{mark_name(mark)} has quality {quality!r}; give a finite number, 0 or more")


def check_droppable(group_id: str, state: GroupState) -> bool:
    """Return whether dropping changes this group; PoolError if it cannot be dropped now."""
    if state is GroupState.OPEN:
        raise PoolError(f"group {group_id!r} has rollouts that run; end them before it is dropped")
    if state is GroupState.LEASED:
        raise PoolError(f"group {group_id!r} was lent to a trainer; release its lease before it is dropped")
    return state in (GroupState.SHORT, GroupState.COMPLETE)


def pool_full(channel: str, limit: GroupLimit) -> PoolFull:
    return PoolFull(f"{limit.groups} groups of channel {channel!r} wait to be trained already; wait, or raise rollout.max_waiting")


def check_claim(count: int, lease_s: float) -> None:
    if count < 1:
        raise PoolError(f"cannot claim {count} groups; claim at least one")
    check_lease_time(lease_s)


def check_lease_time(lease_s: float) -> None:
    if not lease_s >= 0.0:
        raise PoolError(f"a lease cannot last {lease_s} seconds; give 0 or more")


def check_replaceable(rollout: RolloutRef, end: End | None, state: GroupState, *, was_leased: bool) -> None:
    """Refuse to replace a rollout that counts: it has completed, or a trainer may have used its group."""
    if end is End.COMPLETED:
        raise PoolError(f"rollout {rollout.id!r} has completed and counts; only one that failed or was lost can be replaced")
    if was_leased or state not in UNCLAIMED:
        raise PoolError(f"rollout {rollout.id!r} cannot be replaced: group {rollout.group_id!r} was lent to a trainer or dropped")


def check_acknowledgement(group_id: str, lease_id: str, version: int, *, holder: str | None, trained: LedgerEntry | None) -> bool:
    """Return whether an acknowledgement changes this group: False if it was made before.

    PoolError if the group was trained under another lease, or another open lease, `holder`, has it now.
    """
    if trained == LedgerEntry(lease_id, version):
        return False
    if trained is not None:
        raise PoolError(
            f"lease {lease_id!r}: group {group_id!r} was trained into version {trained.version} by lease {trained.lease_id!r}"
        )
    if holder not in (None, lease_id):
        raise PoolError(f"lease {lease_id!r} ran out and lease {holder!r} holds group {group_id!r} now; drop this update")
    return True


class VersionRange(NamedTuple):
    """The policy versions on the tokens of a step."""

    oldest: int | None
    """None without tokens."""
    newest: int


def version_range(versions: Sequence[int]) -> VersionRange:
    # mostly they are all the same, and counting is faster than two passes for minimum and maximum
    if versions and versions.count(versions[0]) == len(versions):
        return VersionRange(versions[0], versions[0])
    return VersionRange(min(versions, default=None), max(versions, default=0))


def oldest_version(versions: Iterable[int | None]) -> int | None:
    """Return the oldest policy version; None entries are rollouts without tokens."""
    return min((v for v in versions if v is not None), default=None)


# Leases


class OpenLease(NamedTuple):
    """A lease that is neither released nor acknowledged, as stored."""

    lease_id: str
    renewals: int
    """How often its holder has renewed it."""
    lease_s: float


class _Deadline(NamedTuple):
    renewals: int
    at: float


class LeaseClock:
    """Deadlines of open leases by this process's monotonic clock, which no wall clock can disturb.

    The time of a lease starts when this process first sees it, and again when it sees a new renewal. So the lease of another
    process, or of one that died, expires `lease_s` seconds after this process last saw it renewed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deadlines: dict[str, _Deadline] = {}

    def start(self, lease: OpenLease) -> None:
        """Start the time of a lease that was given or renewed just now."""
        self._deadlines[lease.lease_id] = _Deadline(lease.renewals, self._clock() + lease.lease_s)

    def expired(self, leases: Iterable[OpenLease]) -> list[str]:
        """Return which of all open leases have expired. A lease that is not among `leases` is forgotten."""
        now, known = self._clock(), self._deadlines
        self._deadlines = {}
        for lease in leases:
            deadline = known.get(lease.lease_id)
            if deadline is None or deadline.renewals != lease.renewals:
                deadline = _Deadline(lease.renewals, now + lease.lease_s)
            self._deadlines[lease.lease_id] = deadline
        return [lease_id for lease_id, deadline in self._deadlines.items() if deadline.at <= now]


# Names for messages


def step_name(rollout_id: str, index: int) -> str:
    return f"step {index} of rollout {rollout_id!r}"


def node_name(rollout_id: str, node: int) -> str:
    return f"node {node} of rollout {rollout_id!r}"


def mark_name(mark: Mark) -> str:
    return f"the mark on rollout {mark.rollout_id!r}" + ("" if mark.step is None else f", step {mark.step}")


def grade_name(grade: Grade) -> str:
    return f"the reward from {grade.source!r} for rollout {grade.rollout_id!r}"


# Errors


def unknown_rollout(rollout_id: str) -> PoolError:
    return PoolError(f"no rollout {rollout_id!r} in this pool; open its group first")


def unknown_lease(lease_id: str) -> PoolError:
    return PoolError(f"no lease {lease_id!r} in this pool; claim groups first")


def lease_is_over(lease_id: str) -> PoolError:
    return PoolError(f"lease {lease_id!r} has expired or was given back; claim again")


def unknown_group(group_id: str) -> PoolError:
    return PoolError(f"no group {group_id!r} in this pool; open it first")


def missing_step(mark: Mark) -> PoolError:
    return PoolError(f"{mark_name(mark)}: there is no such step; mark one that was recorded")


def missing_node(rollout_id: str, index: int, node: int) -> PoolError:
    return PoolError(f"{step_name(rollout_id, index)} continues node {node}, which is not stored; append it with its node")


def missing_parent(rollout_id: str, node: int, parent: int) -> PoolError:
    return PoolError(f"{node_name(rollout_id, node)} continues step {parent}, which is not stored; append that step first")


def too_late(name: str, end: End) -> PoolError:
    return PoolError(f"{name} came too late and was not stored: the rollout ended as {end}")


def graded_before(rollout_id: str) -> PoolError:
    return PoolError(
        f"rollout {rollout_id!r} has been graded already; neither its end nor the grades that came with it were stored"
    )


def conflict(name: str) -> PoolConflict:
    return PoolConflict(f"{name} is stored with different content; the first one stays")


def rollout_taken(rollout_id: str) -> PoolError:
    return PoolError(f"rollout {rollout_id!r} belongs to another group already; ids are `group.place.attempt`")


# Statistics


def sum_counters(counters: Iterable[tuple[str, str, int]]) -> PoolStats:
    """Build statistics from counters (kind, name, n). Of repeated ones the sum counts, or the highest for kind `top`."""
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for kind, name, n in counters:
        known = counts[kind].get(name, 0)
        counts[kind][name] = max(known, n) if kind == "top" and name in counts[kind] else known + n
    state, plain, top = counts["state"], counts["count"], counts["top"]
    groups = sum(state.values())
    return PoolStats(
        groups=groups,
        groups_complete=groups - state.get(GroupState.OPEN, 0),
        groups_leased=state.get(GroupState.LEASED, 0),
        groups_trained=state.get(GroupState.TRAINED, 0),
        groups_stale=state.get(GroupState.STALE, 0),
        groups_short=state.get(GroupState.SHORT, 0),
        groups_dropped=state.get(GroupState.DROPPED, 0),
        rollouts=plain.get("rollouts", 0),
        steps=plain.get("steps", 0),
        tokens=plain.get("tokens", 0),
        prompt_tokens=plain.get("prompt_tokens", 0),
        ends=counts["end"],
        drops=counts["drop"],
        breaks=counts["break"],
        last_seq=top.get("seq", -1),
        last_version=max(top.get("version", 0), 0),
    )
