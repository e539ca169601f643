"""GSPO: ratios of whole sequences, so that all tokens of one are clipped or none. arXiv 2507.18071."""

from typing import Literal

import torch
from pydantic import Field

from penstock.train.losses.base import Loss, LossSettings, LossTokens, mean_within, whole_sequences


class GspoSettings(LossSettings):
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """How far the ratio of a sequence may fall before its gradient stops; a mean over tokens moves far less than one of them."""
    clip_high: float = Field(default=4e-4, gt=0)
    """How far it may rise."""
    level: Literal["sequence", "turn"] = "sequence"
    """What has one ratio: a whole training sequence, or each reply of it."""


@whole_sequences
def gspo(tokens: LossTokens, settings: GspoSettings) -> Loss:
    """PPO's clip of a ratio that is the geometric mean over the tokens of a sequence; importance weights likewise."""
    ids = tokens.sequences if settings.level == "sequence" else tokens.turns
    ratio = torch.exp(mean_within(ids, tokens.new - tokens.proximal))  # [tokens], as all below
    bounded = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    plain, limited = ratio * tokens.advantages, bounded * tokens.advantages
    importance = torch.exp(mean_within(ids, tokens.proximal - tokens.behaviour)).clamp(max=settings.importance_cap).detach()
    return Loss(-importance * torch.minimum(plain, limited), ratio.detach(), importance, (limited < plain).float())
