"""When training cannot go on: every rollout fails, or no group has enough that did not. Said once, with the reason."""

from collections import Counter

from penstock.config import RolloutSection
from penstock.errors import TrainError
from penstock.records import Attempt

ALL_SHORT = 20
"""How many times the groups of a step may be dropped for want of completed rollouts before that step is given up."""


def refuse_all_failed(attempts: list[Attempt], which: str) -> None:
    """Training cannot go on where every rollout fails: say why, once."""
    if any(attempt.reward is not None for attempt in attempts):
        return
    (end, message), count = Counter((str(a.end), a.message) for a in attempts).most_common(1)[0]
    share = "each" if count == len(attempts) else f"{count} of them"
    raise TrainError(f"all {len(attempts)} rollouts {which} failed, {share} with {end}: {message or 'no message'}")


def refuse_all_short(dropped: int, limits: RolloutSection) -> None:
    """Training cannot go on where no group has enough completed rollouts: the scheduler would make new ones for ever."""
    if dropped >= ALL_SHORT * limits.groups_per_step:
        raise TrainError(
            f"{dropped} groups were dropped since the last step, each with fewer than rollout.min_size = {limits.min_size} "
            f"completed rollouts of {limits.group_size}; raise rollout.top_up, lower rollout.min_size, or see why they fail"
        )
