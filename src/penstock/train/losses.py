"""Losses: pure functions from log-probabilities and advantages to one number per trained token."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config import TrainSection


class Tokens(NamedTuple):
    """What is known of the trained tokens; every tensor [tokens]."""

    new: Tensor
    """Log-probabilities under the weights being trained, at the temperature sampled at; the only ones with a gradient."""
    proximal: Tensor
    """The same under the weights before this batch's first update."""
    behaviour: Tensor
    """The engine's, under the distribution it sampled from."""
    advantages: Tensor


class Loss(NamedTuple):
    """Per token; every tensor [tokens], none but `values` with a gradient."""

    values: Tensor
    ratio: Tensor
    """How much likelier a token became by the updates on this batch."""
    importance: Tensor
    """The correction for having been sampled from another distribution than the proximal one, capped."""
    clipped: Tensor
    """1 where the clip stopped the gradient."""


def clip(tokens: Tokens, section: TrainSection) -> Loss:
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


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Per token [tokens]: an estimate of KL(new ‖ reference) that is never negative, for tokens sampled from `new`."""
    gap = reference - new
    return torch.exp(gap) - 1.0 - gap
