"""OPO: rewards less the baseline of least variance, a mean weighted by length. arXiv 2505.23585."""

from penstock.records import Group
from penstock.train.advantages.base import equal


def opo(group: Group) -> list[float]:
    """Each reward less the group's mean weighted by sampled tokens; zeros where all rewards are the same."""
    rewards = group.rewards
    lengths = [sum(step.sampled for step in attempt.steps) for attempt in group.graded]
    if equal(group):
        return [0.0] * len(rewards)
    if not any(lengths):
        lengths = [1] * len(rewards)
    baseline = sum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [reward - baseline for reward in rewards]
