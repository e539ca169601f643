"""REINFORCE: the log-probability times the advantage. Williams 1992."""

import torch

from penstock.train.losses.base import Loss, LossSettings, LossTokens


def reinforce(tokens: LossTokens, settings: LossSettings) -> Loss:
    """Weighted by the new over the behaviour probability, capped and without a gradient; nothing else is clipped."""
    ratio = torch.exp(tokens.new - tokens.proximal).detach()  # [tokens], as all below
    weight = torch.exp(tokens.new - tokens.behaviour).detach()
    importance = weight.clamp(max=settings.importance_cap)
    return Loss(-importance * tokens.advantages * tokens.new, ratio, importance, (importance < weight).float())


def likelihood(tokens: LossTokens) -> Loss:
    """For supervised training, without corrections: no ratio, no importance weight, nothing is clipped."""
    ratio = torch.exp(tokens.new - tokens.proximal).detach()  # [tokens]
    return Loss(-tokens.advantages * tokens.new, ratio, torch.ones_like(ratio), torch.zeros_like(ratio))
