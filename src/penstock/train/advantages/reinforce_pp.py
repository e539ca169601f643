"""REINFORCE++: rewards standardised over all rollouts of the step. arXiv 2501.03262."""

from collections.abc import Sequence

from penstock.config import Section
from penstock.records import Group
from penstock.train.advantages.base import centred, over_batch


class ReinforcePlusPlusSettings(Section):
    group_baseline: bool = False
    """Take the mean of the group away first (REINFORCE++-baseline): better where rewards of tasks differ."""


@over_batch
def reinforce_pp(groups: Sequence[Group], settings: ReinforcePlusPlusSettings) -> list[list[float]]:
    """Each reward less the mean of the batch, over its standard deviation; zeros where all rewards are the same."""
    parts = [centred(group.rewards, scaled=False) if settings.group_baseline else group.rewards for group in groups]
    flat = iter(centred(value for part in parts for value in part))
    return [[next(flat) for _ in part] for part in parts]
