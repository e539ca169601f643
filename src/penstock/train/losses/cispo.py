"""CISPO: the weight of a token is clipped, its gradient never. MiniMax-M1, arXiv 2506.13585."""

import torch
from pydantic import Field

from penstock.train.losses.base import Loss, LossSettings, LossTokens, importance_weights


class CispoSettings(LossSettings):
    clip_high: float = Field(default=0.28, gt=0)
    """How far above 1 the weight of a token may be."""


def cispo(tokens: LossTokens, settings: CispoSettings) -> Loss:
    """REINFORCE, each token weighted by its ratio, capped from above and without a gradient."""
    ratio = torch.exp(tokens.new - tokens.proximal).detach()  # [tokens], as all below
    capped, importance = ratio.clamp(max=1.0 + settings.clip_high), importance_weights(tokens, settings.importance_cap)
    values = -importance * capped * tokens.advantages * tokens.new
    return Loss(values, ratio, importance, (capped < ratio).float())
