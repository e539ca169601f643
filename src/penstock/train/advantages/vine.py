"""Values of steps by continuations: what each call added to the expected reward. VinePPO, Kazemnejad et al., arXiv 2410.01679."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pydantic import Field

from penstock.config import Section
from penstock.records import Group, Rollout
from penstock.train.advantages.base import EPSILON, needing


class VineSettings(Section):
    least: int = Field(default=1, ge=1)
    """Continuations of a call that must complete for its value to count; with fewer, it shares credit with the call before."""
    scaled: bool = False
    """Divide by the standard deviation of the group's rewards, as GRPO does."""


@needing("branches")
def vine(group: Group, settings: VineSettings) -> list[dict[int, float]]:
    """The value before the next call less the value before this one; after the last call, the reward is the value.

    A value is the mean reward of continuations (`rollout.branches`); before the first call it is that of the group.
    """
    if not group.graded:
        return []
    values, mean = step_values(group, settings.least), _mean(group.rewards)
    spread = statistics.pstdev(group.rewards) + EPSILON if settings.scaled else 1.0
    return [_gains(attempt, {0: mean, **values[attempt.ref.id]}, spread) for attempt in group.graded]


def step_values(group: Group, least: int = 1) -> Mapping[str, dict[int, float]]:
    """Returns the mean reward of the continuations from each step that has them, by rollout."""
    rewards = defaultdict[str, defaultdict[int, list[float]]](lambda: defaultdict(list))
    for attempt in group.branches:
        point = attempt.ref.branch
        if point is not None and attempt.reward is not None:
            rewards[point.rollout_id][point.step].append(attempt.reward)
    found = {name: {step: _mean(each) for step, each in by_step.items() if len(each) >= least} for name, by_step in rewards.items()}
    return defaultdict(dict, found)


def _gains(attempt: Rollout, values: Mapping[int, float], spread: float) -> dict[int, float]:
    """Returns the credit of each step; steps between two with a value share what was gained between them."""
    known, end = sorted(values), attempt.reward or 0.0
    gains = dict[int, float]()
    for step in attempt.steps:
        before = max(each for each in known if each <= step.index)
        later = [each for each in known if each > step.index]
        gains[step.index] = ((values[later[0]] if later else end) - values[before]) / spread
    return gains


def _mean(values: Sequence[float]) -> float:
    """Of equal values it is that value, so that nothing gained is exactly 0."""
    return values[0] if len(set(values)) == 1 else statistics.fmean(values)
