"""Pass@k: credit for the chance that at least one of k attempts passes. Pass@k Training, arXiv 2508.10751."""

from math import comb, sqrt

from pydantic import Field

from penstock.config import Section
from penstock.records import Group


class PassAtKSettings(Section):
    k: int = Field(default=4, ge=1)
    """Attempts of which one must pass. A group must have at least as many graded rollouts, else k is their number."""
    passes: float = 1.0
    """Reward from which an attempt has passed."""


def pass_at_k(group: Group, settings: PassAtKSettings) -> list[float]:
    """All subsets of k attempts, each with reward 1 if one passes, standardised; an attempt gets the mean of its subsets'."""
    passed = [reward >= settings.passes for reward in group.rewards]
    size, failed, k = len(passed), len(passed) - sum(passed), min(settings.k, len(passed))
    if failed in (0, size):
        return [0.0] * size
    mean = 1.0 - comb(failed, k) / comb(size, k)
    if mean >= 1.0:  # every subset has an attempt that passes
        return [0.0] * size
    spread = sqrt(mean * (1.0 - mean))
    failing = 1.0 - comb(failed - 1, k - 1) / comb(size - 1, k - 1)
    return [((1.0 if one else failing) - mean) / spread for one in passed]
