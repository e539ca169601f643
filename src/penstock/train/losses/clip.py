"""The clipped surrogate of PPO, weighted by truncated importance sampling. PPO, arXiv 1707.06347; clip-higher of DAPO."""

from penstock.config import TrainSection
from penstock.train.losses.base import Loss, LossTokens
from penstock.train.losses.dapo import clipped_surrogate


def clip(tokens: LossTokens, section: TrainSection) -> Loss:
    """PPO's clipped surrogate with a wider upper bound, times the truncated importance weight of each token.

    The first update on a batch has a ratio of 1, so its gradient is that of REINFORCE under the importance weights.
    """
    return clipped_surrogate(tokens, low=section.clip_low, high=section.clip_high, cap=section.importance_cap)
