"""MaxRL: rewards less the mean, over the mean, which raises the likelihood of a success. arXiv 2602.02710."""

import statistics

from penstock.records import Group
from penstock.train.advantages.base import equal


def maxrl(group: Group) -> list[float]:
    """Rare successes weigh most. Zeros where all rewards are the same, or their mean is not above 0."""
    rewards = group.rewards
    mean = statistics.fmean(rewards) if rewards else 0.0
    if equal(group) or mean <= 0:
        return [0.0] * len(rewards)
    return [(reward - mean) / mean for reward in rewards]
