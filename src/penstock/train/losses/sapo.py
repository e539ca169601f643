"""SAPO: a soft gate in place of a clip; gradients fade with the distance from 1. arXiv 2511.20347."""

import torch
from pydantic import Field

from penstock.train.losses.base import Loss, LossSettings, LossTokens, importance_weights


class SapoSettings(LossSettings):
    temperature_positive: float = Field(default=1.0, gt=0)
    """How fast gradients fade for tokens of positive advantage; higher is faster."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """For those of negative advantage, whose gradients also raise tokens that were not sampled."""


def sapo(tokens: LossTokens, settings: SapoSettings) -> Loss:
    """A sigmoid of the ratio, scaled so that its slope at 1 is 1. `clipped` is 1 where less than half of the slope is left."""
    ratio = torch.exp(tokens.new - tokens.proximal)  # [tokens], as all below
    positive = torch.full_like(ratio, settings.temperature_positive)
    heat = torch.where(tokens.advantages > 0, positive, torch.full_like(ratio, settings.temperature_negative))
    gate = torch.sigmoid(heat * (ratio - 1.0))
    importance = importance_weights(tokens, settings.importance_cap)
    slope = 4.0 * gate * (1.0 - gate)
    return Loss(-importance * 4.0 / heat * gate * tokens.advantages, ratio.detach(), importance, (slope < 0.5).float())
