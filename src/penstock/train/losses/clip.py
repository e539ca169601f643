"""The clipped surrogate of PPO with DAPO's wider upper bound. PPO, arXiv 1707.06347; DAPO, arXiv 2503.14476.

Other parts of DAPO are settings of their own: `train.dynamic_sampling` and `train.overlong`.
"""

import torch
from pydantic import Field

from penstock.config import TrainSection
from penstock.train.advantages.base import mean_over
from penstock.train.losses.base import Loss, LossSettings, LossTokens, importance_weights


def clip(tokens: LossTokens, section: TrainSection) -> Loss:
    """PPO's clipped surrogate with a wider upper bound, times the truncated importance weight of each token.

    The first update on a batch has a ratio of 1, so its gradient is that of REINFORCE under the importance weights.
    """
    return clipped_surrogate(tokens, low=section.clip_low, high=section.clip_high, cap=section.importance_cap)


class DapoSettings(LossSettings):
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a token's probability may fall, on one batch, before its gradient stops."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far it may rise."""


@mean_over("token")
def dapo(tokens: LossTokens, settings: DapoSettings) -> Loss:
    """DAPO: the same clip with its own settings, as a mean over all tokens of the batch."""
    return clipped_surrogate(tokens, low=settings.clip_low, high=settings.clip_high, cap=settings.importance_cap)


def clipped_surrogate(tokens: LossTokens, *, low: float, high: float, cap: float) -> Loss:
    """The smaller of ratio times advantage and bounded ratio times advantage, times the importance weight."""
    ratio = torch.exp(tokens.new - tokens.proximal)  # [tokens], as all below
    plain, limited = ratio * tokens.advantages, ratio.clamp(1.0 - low, 1.0 + high) * tokens.advantages
    importance = importance_weights(tokens, cap)
    return Loss(-importance * torch.minimum(plain, limited), ratio.detach(), importance, (limited < plain).float())
