"""Dr. GRPO: rewards less the group's mean, without the division that favours groups of little spread."""

import statistics

from penstock.records import Group


def dr_grpo(group: Group) -> list[float]:
    """Each reward less the mean; exact zeros where all rewards are the same."""
    rewards = group.rewards
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]
