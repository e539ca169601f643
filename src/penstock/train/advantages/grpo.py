"""GRPO: rewards standardised within the group. DeepSeekMath, arXiv 2402.03300."""

from penstock.records import Group
from penstock.train.advantages.base import centred


def grpo(group: Group) -> list[float]:
    """Each reward less the mean, over the population standard deviation; zeros where all rewards are the same."""
    return centred(group.rewards)
