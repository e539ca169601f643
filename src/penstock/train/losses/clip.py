"""The clipped surrogate of PPO, weighted by truncated importance sampling."""

import torch

from penstock.config import TrainSection
from penstock.train.losses.base import Loss, LossTokens


def clip(tokens: LossTokens, section: TrainSection) -> Loss:
    """PPO's clipped surrogate with a wider upper bound, times the truncated importance weight of each token.

    The first update on a batch has a ratio of 1, so its gradient is that of REINFORCE under the importance weights.
    """
    ratio = torch.exp(tokens.new - tokens.proximal)  # [tokens]
    bounded = ratio.clamp(1.0 - section.clip_low, 1.0 + section.clip_high)
    plain, limited = ratio * tokens.advantages, bounded * tokens.advantages
    importance = torch.exp(tokens.proximal - tokens.behaviour).clamp(max=section.importance_cap).detach()
    return Loss(
        values=-importance * torch.minimum(plain, limited),
        ratio=ratio.detach(),
        importance=importance,
        clipped=(limited < plain).float(),
    )
