"""Dr. GRPO: rewards less the group's mean, without the division that favours groups of little spread. arXiv 2503.20783."""

from penstock.records import Group
from penstock.train.advantages.base import centred, mean_over


@mean_over("constant")
def dr_grpo(group: Group) -> list[float]:
    """Each reward less the mean; exact zeros where all rewards are the same."""
    return centred(group.rewards, scaled=False)
