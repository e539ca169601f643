"""Groups that cannot be trained: found, taken out of training for good, counted and told. All others go on.

A group that makes an update fail is tried once more, alone. If it fails again, it is at fault; if all pass alone, none is.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from penstock.errors import ConfigError, EngineError, PoolError, TrainError
from penstock.records import MAX_REWARD, End, Group, Lease
from penstock.rollout.author_tasks import one_line
from penstock.train.learner import is_machine_error
from penstock.train.training_run import TrainingRun

CRASHED = "crashed the trainer"
BEYOND = "a reward is out of bounds"
EQUAL = "all rewards are equal"
"""Reasons of dropped groups, as the pool counts them."""
MAX_ROUNDS = 3
"""Training fails after this many times `groups_per_step` groups crashed it since the last step: then it is not the groups."""

TryUpdate = Callable[[Sequence[Group]], Awaitable[object]]
"""Computes an update from these groups and drops it."""


def may_be_data(error: Exception) -> bool:
    """Returns whether a group can be the reason of `error`, not the machine, the pool or the engine."""
    return not (isinstance(error, PoolError | EngineError | ConfigError) or is_machine_error(error))


def out_of_bounds(groups: Sequence[Group]) -> dict[str, str]:
    """Returns a message for each group with a reward that no grader may give; an earlier penstock stored it."""
    return {
        group.id: f"rollout {attempt.rollout.id} has reward {attempt.grades_total:g}, beyond {MAX_REWARD:g}"
        for group in groups
        for attempt in group.attempts
        if attempt.end is End.COMPLETED and not attempt.void and abs(attempt.grades_total or 0.0) > MAX_REWARD
    }


async def find_culprits(groups: Sequence[Group], *attempts: TryUpdate) -> dict[str, str]:
    """Returns a message for each group that fails alone in the first of `attempts` in which any does."""
    for attempt in attempts:
        if found := {group.id: message for group in groups if (message := await _failure(group, attempt))}:
            return found
    return {}


async def set_aside(run: TrainingRun, lease: Lease, messages: Mapping[str, str], reason: str) -> None:
    """Returns a lease, and takes these groups of it out of training. A kill in between leaves them as they were."""
    await run.pool.release(lease.id)
    for group_id, message in messages.items():
        run.events.emit("group.drop", group_id=group_id, reason=reason, message=message)
        await run.pool.drop(group_id, reason)


def refuse_too_many(messages: Sequence[str], groups_per_step: int) -> None:
    """Raises TrainError if no group seems to pass, as all would be set aside otherwise."""
    if len(messages) >= MAX_ROUNDS * groups_per_step:
        raise TrainError(
            f"{len(messages)} groups crashed the trainer since the last step and were set aside, the last with: {messages[-1]}; "
            "look at train.advantage, train.loss and the grader"
        )


async def _failure(group: Group, attempt: TryUpdate) -> str:
    try:
        await attempt([group])
    except Exception as error:
        if not may_be_data(error):
            raise
        return one_line(error)
    return ""
