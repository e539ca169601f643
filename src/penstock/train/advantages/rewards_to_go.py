"""Rewards to go: what a step and those after it earned, discounted by turns. REINFORCE, Williams 1992."""

from collections import defaultdict
from typing import Literal

from pydantic import Field

from penstock.config import Section
from penstock.records import Group, Rollout
from penstock.train.advantages.base import centred, outcome, step_rewards, turns


class RewardsToGoSettings(Section):
    discount: float = Field(default=1.0, ge=0, le=1)
    """What a reward is worth one turn earlier."""
    baseline: Literal["turn", "group", "none"] = "turn"
    """What the mean is taken over: the steps of the same turn, all steps of the group, or 0 in place of a mean."""


def rewards_to_go(group: Group, settings: RewardsToGoSettings) -> list[dict[int, float]]:
    """A step's grade and, discounted, those of the later steps of its transcript; the outcome counts at the last of them."""
    credit = [_returns(attempt, settings.discount) for attempt in group.graded]
    if settings.baseline == "none":
        return credit
    alike = defaultdict[object, list[tuple[int, int]]](list)
    for place, attempt in enumerate(group.graded):
        for index, turn in turns(attempt).items():
            alike[turn if settings.baseline == "turn" else None].append((place, index))
    for keys in alike.values():
        values = centred((credit[place][index] for place, index in keys), scaled=False)
        for (place, index), value in zip(keys, values, strict=True):
            credit[place][index] = value
    return credit


def _returns(attempt: Rollout, discount: float) -> dict[int, float]:
    own, found, later = step_rewards(attempt), dict[int, float](), dict[str, float]()
    for step in sorted(attempt.steps, key=lambda step: -step.index):
        ended = outcome(attempt, step.transcript) or 0.0
        rest = discount * later[step.transcript] if step.transcript in later else ended
        found[step.index] = later[step.transcript] = own.get(step.index, 0.0) + rest
    return found
