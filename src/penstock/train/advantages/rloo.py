"""RLOO: each reward against the mean of the others'. Back to Basics, arXiv 2402.14740."""

from penstock.records import Group
from penstock.train.advantages.base import equal


def rloo(group: Group) -> list[float]:
    """Leave-one-out; zeros where there is nothing to compare with, or all rewards are the same."""
    rewards = group.rewards
    if equal(group):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]
