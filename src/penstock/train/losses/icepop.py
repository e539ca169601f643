"""IcePop: tokens on which engine and trainer disagree too much, either way, are left out. Ring-1T, arXiv 2510.18855."""

import torch
from pydantic import Field

from penstock.config import Section
from penstock.train.losses.base import Loss, LossTokens


class IcepopSettings(Section):
    lowest: float = Field(default=0.5, gt=0)
    """Smallest importance weight of a token that is trained,"""
    highest: float = Field(default=5.0, gt=0)
    """and the largest."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a token's probability may fall, on one batch, before its gradient stops."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far it may rise."""


def icepop(tokens: LossTokens, settings: IcepopSettings) -> Loss:
    """PPO's clip times the importance weight, which is 0 outside of its bounds; `clipped` counts those tokens too."""
    ratio = torch.exp(tokens.new - tokens.proximal)  # [tokens], as all below
    limited = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * tokens.advantages
    plain, weight = ratio * tokens.advantages, torch.exp(tokens.proximal - tokens.behaviour).detach()
    outside = (weight < settings.lowest) | (weight > settings.highest)
    importance = weight.masked_fill(outside, 0.0)
    return Loss(-importance * torch.minimum(plain, limited), ratio.detach(), importance, ((limited < plain) | outside).float())
