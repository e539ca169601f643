"""What a loss function takes and returns, and the KL penalty that any of them can be combined with."""

from typing import NamedTuple

import torch
from torch import Tensor


class LossTokens(NamedTuple):
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


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Per token [tokens]: an estimate of KL(new ‖ reference) that is never negative, for tokens sampled from `new`."""
    gap = reference - new
    return torch.exp(gap) - 1.0 - gap
