"""The log-likelihood of tokens, weighted by their advantage: what supervised training takes. Williams 1992, without corrections."""

import torch

from penstock.train.losses.base import Loss, LossTokens


def likelihood(tokens: LossTokens) -> Loss:
    """Where a token came from does not matter: no ratio, no importance weight, nothing is clipped."""
    ratio = torch.exp(tokens.new - tokens.proximal).detach()  # [tokens]
    return Loss(-tokens.advantages * tokens.new, ratio, torch.ones_like(ratio), torch.zeros_like(ratio))
