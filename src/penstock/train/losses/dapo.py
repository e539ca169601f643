"""DAPO: PPO's clip with a wider upper bound, as a mean over all tokens of the batch. arXiv 2503.14476.

Its other parts are settings of their own: `train.dynamic_sampling` and `train.overlong`.
"""

import torch
from pydantic import Field

from penstock.train.losses.base import Loss, LossSettings, LossTokens, importance_weights
from penstock.train.means import mean_over


class DapoSettings(LossSettings):
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a token's probability may fall, on one batch, before its gradient stops."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far it may rise."""


@mean_over("token")
def dapo(tokens: LossTokens, settings: DapoSettings) -> Loss:
    return clipped_surrogate(tokens, low=settings.clip_low, high=settings.clip_high, cap=settings.importance_cap)


def clipped_surrogate(tokens: LossTokens, *, low: float, high: float, cap: float) -> Loss:
    """The smaller of ratio times advantage and bounded ratio times advantage, times the importance weight."""
    ratio = torch.exp(tokens.new - tokens.proximal)  # [tokens], as all below
    plain, limited = ratio * tokens.advantages, ratio.clamp(1.0 - low, 1.0 + high) * tokens.advantages
    importance = importance_weights(tokens, cap)
    return Loss(-importance * torch.minimum(plain, limited), ratio.detach(), importance, (limited < plain).float())
