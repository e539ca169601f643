"""What a pool refuses, and when a group is complete or stale: pure, and the same for every pool."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from penstock.errors import PoolConflict, PoolError, PoolFull
from penstock.pool.base import Bound, PoolStats
from penstock.records import End, Grade, Mark, Node, Rollout, Step, Task


class State(StrEnum):
    """Where a group stands; `pool.claim` takes complete ones only."""

    OPEN = "open"
    COMPLETE = "complete"
    LEASED = "leased"
    TRAINED = "trained"
    STALE = "stale"
    SHORT = "short"
    DROPPED = "dropped"


WAITING = (State.OPEN, State.SHORT, State.COMPLETE, State.LEASED)
"""States of groups that are still to be trained."""
UNCLAIMED = (State.OPEN, State.SHORT, State.COMPLETE)
"""States of groups that no trainer has seen yet, or that came back."""
OVERFLOW = "overflow"
"""Why a group was dropped that had to make room."""


class Trained(NamedTuple):
    """A line of the ledger: the lease that a group was trained under, and into which version."""

    lease_id: str
    version: int


def check_group(task: Task, rollouts: Sequence[Rollout]) -> str:
    """The id of the group that these rollouts make; PoolError where they do not make one."""
    if not rollouts:
        raise PoolError(f"a group for task {task.id!r} needs at least one rollout; give one per place")
    group_id = rollouts[0].group_id
    if len({(r.group_id, r.channel) for r in rollouts}) > 1 or any(r.task_id != task.id for r in rollouts):
        raise PoolError(f"group {group_id!r}: its rollouts must share one group id, channel and task {task.id!r}")
    if len({r.place for r in rollouts}) < len(rollouts) or len({r.id for r in rollouts}) < len(rollouts):
        raise PoolError(f"group {group_id!r}: two rollouts have the same place or id; number the places 0, 1, 2, …")
    return group_id


def check_step(step: Step, node: Node | None) -> None:
    """Refuse a step whose token columns are not aligned, or a node that is not the step's own."""
    size, full = len(step.completion_ids), step.full_logprobs
    lengths = [len(column) for column in (step.logprobs, step.versions, *([] if full is None else [full]))]
    if lengths.count(size) != len(lengths):
        what = f"has {size} tokens but {lengths} log-probabilities and versions; record one of each per token"
    elif not math.isfinite(sum(step.logprobs) + sum(full or ())):
        what = "has a log-probability that is not finite; no token is ever sampled at such odds, so look at the engine"
    elif node is not None and (node.rollout_id, node.id) != (step.rollout_id, step.node):
        what = f"continues node {step.node}, but came with node {node.id} of rollout {node.rollout_id!r}"
    else:
        return
    raise PoolError(f"{step_name(step.rollout_id, step.index)} {what}")


def check_grade(grade: Grade) -> None:
    """Refuse a reward that nothing can be learnt from."""
    reward: Any = grade.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise PoolError(f"{grade_name(grade)} is {reward!r}; a reward must be a finite number")


def check_grades(rollout_id: str, grades: Sequence[Grade]) -> None:
    """Refuse grades that cannot be given together with the end of this rollout."""
    for grade in grades:
        if grade.rollout_id != rollout_id:
            raise PoolError(f"{grade_name(grade)} came with the end of rollout {rollout_id!r}; give it to its own rollout")
        check_grade(grade)


def check_mark(mark: Mark) -> None:
    """Refuse a weight that is none."""
    quality: Any = mark.quality
    if isinstance(quality, bool) or not isinstance(quality, int | float) or not math.isfinite(quality) or quality < 0:
        raise PoolError(f"{mark_name(mark)} has quality {quality!r}; give a finite number, 0 or more")


def check_droppable(group_id: str, state: State) -> bool:
    """Whether dropping changes this group; PoolError where it cannot be dropped now."""
    if state is State.OPEN:
        raise PoolError(f"group {group_id!r} has rollouts that run; end them before it is dropped")
    if state is State.LEASED:
        raise PoolError(f"group {group_id!r} was lent to a trainer; release its lease before it is dropped")
    return state in (State.SHORT, State.COMPLETE)


def full(channel: str, bound: Bound) -> PoolFull:
    return PoolFull(f"{bound.groups} groups of channel {channel!r} wait to be trained already; wait, or raise rollout.max_waiting")


def is_short(completed: int, min_size: int) -> bool:
    """Whether a group that has ended with so many completed rollouts has too few to train on."""
    return completed < min_size


def check_claim(count: int, lease_s: float) -> None:
    """Refuse a claim that could never be served."""
    if count < 1:
        raise PoolError(f"cannot claim {count} groups; claim at least one")
    check_lease_time(lease_s)


def check_lease_time(lease_s: float) -> None:
    """Refuse a time that is no time."""
    if not lease_s >= 0.0:
        raise PoolError(f"a lease cannot last {lease_s} seconds; give 0 or more")


def check_replaceable(rollout: Rollout, end: End | None, state: State, *, lent: bool) -> None:
    """Refuse a second attempt where the first one counts: it has completed, or a trainer may have used its group."""
    if end is End.COMPLETED:
        raise PoolError(f"rollout {rollout.id!r} has completed and counts; only one that failed or was lost can be replaced")
    if lent or state not in (State.OPEN, State.SHORT, State.COMPLETE):
        raise PoolError(f"rollout {rollout.id!r} cannot be replaced: group {rollout.group_id!r} was lent to a trainer or dropped")


def acknowledges(group_id: str, lease_id: str, version: int, *, holder: str | None, trained: Trained | None) -> bool:
    """Whether an acknowledgement changes this group; False where it was made before, PoolError where another came between.

    `holder` is the open lease that has the group now.
    """
    if trained == Trained(lease_id, version):
        return False
    if trained is not None:
        raise PoolError(
            f"lease {lease_id!r}: group {group_id!r} was trained into version {trained.version} by lease {trained.lease_id!r}"
        )
    if holder not in (None, lease_id):
        raise PoolError(f"lease {lease_id!r} ran out and lease {holder!r} holds group {group_id!r} now; drop this update")
    return True


class Span(NamedTuple):
    """The policy versions on the tokens of a step."""

    oldest: int | None
    """None where there is no token."""
    newest: int


def version_span(versions: Sequence[int]) -> Span:
    """The oldest and the newest of them; mostly they are all the same, which is found out faster than a minimum."""
    if versions and versions.count(versions[0]) == len(versions):
        return Span(versions[0], versions[0])
    return Span(min(versions, default=None), max(versions, default=0))


def oldest_version(versions: Iterable[int | None]) -> int | None:
    """The oldest policy version among these; None where there is no token."""
    return min((v for v in versions if v is not None), default=None)


def is_stale(oldest: int | None, version: int, max_staleness: int) -> bool:
    """Whether a group whose oldest token has this version must not be trained into `version + 1`."""
    return oldest is not None and oldest < version - max_staleness


def step_name(rollout_id: str, index: int) -> str:
    """A step, for a message."""
    return f"step {index} of rollout {rollout_id!r}"


def node_name(rollout_id: str, node: int) -> str:
    """A node, for a message."""
    return f"node {node} of rollout {rollout_id!r}"


def mark_name(mark: Mark) -> str:
    """The mark, for a message."""
    return f"the mark on rollout {mark.rollout_id!r}" + ("" if mark.step is None else f", step {mark.step}")


def grade_name(grade: Grade) -> str:
    """The grade, for a message."""
    return f"the reward from {grade.source!r} for rollout {grade.rollout_id!r}"


def unknown_rollout(rollout_id: str) -> PoolError:
    return PoolError(f"no rollout {rollout_id!r} in this pool; open its group first")


def unknown_lease(lease_id: str) -> PoolError:
    return PoolError(f"no lease {lease_id!r} in this pool; claim groups first")


def lease_is_over(lease_id: str) -> PoolError:
    """It cannot be kept any longer."""
    return PoolError(f"lease {lease_id!r} has expired or was given back; claim again")


def unknown_group(group_id: str) -> PoolError:
    return PoolError(f"no group {group_id!r} in this pool; open it first")


def missing_step(mark: Mark) -> PoolError:
    """A mark on nothing."""
    return PoolError(f"{mark_name(mark)}: there is no such step; mark one that was recorded")


def missing_node(rollout_id: str, index: int, node: int) -> PoolError:
    """A step hangs in the air."""
    return PoolError(f"{step_name(rollout_id, index)} continues node {node}, which is not stored; append it with its node")


def missing_parent(rollout_id: str, node: int, parent: int) -> PoolError:
    """A node hangs in the air."""
    return PoolError(f"{node_name(rollout_id, node)} continues step {parent}, which is not stored; append that step first")


def too_late(name: str, end: End) -> PoolError:
    """A write of an attempt that is over."""
    return PoolError(f"{name} came too late and was not stored: the rollout ended as {end}")


def differs(name: str) -> PoolConflict:
    """A second value under an id."""
    return PoolConflict(f"{name} is stored with different content; the first one stays")


def taken(rollout_id: str) -> PoolError:
    """A rollout id in use elsewhere."""
    return PoolError(f"rollout {rollout_id!r} belongs to another group already; ids are `group.place.attempt`")


def add_up(tallies: Iterable[tuple[str, str, int]]) -> PoolStats:
    """The statistics that counts by kind and name make; of those that come several times, the highest `top`, else the sum."""
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for kind, name, n in tallies:
        known = counts[kind].get(name, 0)
        counts[kind][name] = max(known, n) if kind == "top" and name in counts[kind] else known + n
    state, plain, top = counts["state"], counts["count"], counts["top"]
    groups = sum(state.values())
    return PoolStats(
        groups=groups,
        groups_complete=groups - state.get(State.OPEN, 0),
        groups_leased=state.get(State.LEASED, 0),
        groups_trained=state.get(State.TRAINED, 0),
        groups_stale=state.get(State.STALE, 0),
        groups_short=state.get(State.SHORT, 0),
        groups_dropped=state.get(State.DROPPED, 0),
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
