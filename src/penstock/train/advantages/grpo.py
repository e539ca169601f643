"""GRPO: rewards standardised within the group."""

import statistics

from penstock.records import Group

EPSILON = 1e-6


def grpo(group: Group) -> list[float]:
    """Each reward less the mean, over the population standard deviation; zeros where all rewards are the same."""
    rewards = group.rewards
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (spread + EPSILON) for reward in rewards]
