"""What a loss takes and returns, and penalties that any of them can be combined with.

A loss is a function of a token's numbers. `whole_sequences` makes it one that takes all tokens of a batch at once, and sees which
sequence and turn each belongs to. A second parameter that is annotated with a `Section` is given the settings of
`[train.loss_settings]`; one with `TrainSection`, those of `[train]`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from penstock.config import Section
from penstock.train.advantages.base import AlgorithmFunction, described

NO_IDS = torch.zeros(0, dtype=torch.long)


class LossTokens(NamedTuple):
    """What is known of the trained tokens; every tensor [tokens]."""

    new: Tensor
    """Log-probabilities under the weights being trained, at the temperature sampled at; the only ones with a gradient."""
    proximal: Tensor
    """The same under the weights before this batch's first update."""
    behaviour: Tensor
    """The engine's, under the distribution it sampled from."""
    advantages: Tensor
    sequences: Tensor = NO_IDS
    """The same number for all tokens of a sequence, from 0 on; empty for a loss that does not take whole sequences."""
    turns: Tensor = NO_IDS
    """Likewise for all tokens of a turn: a step of a sequence."""


class Loss(NamedTuple):
    """Per token; every tensor [tokens], none but `values` with a gradient."""

    values: Tensor
    ratio: Tensor
    """How much likelier a token became by the updates on this batch."""
    importance: Tensor
    """The correction for having been sampled from another distribution than the proximal one, capped."""
    clipped: Tensor
    """1 where the clip stopped the gradient."""


class LossSettings(Section):
    importance_cap: float = Field(default=2.0, gt=0)
    """Ceiling of the importance weight that corrects for stale or tempered behaviour."""


def whole_sequences(function: Callable[..., Any]) -> AlgorithmFunction:
    """Marks a loss that needs all tokens of a sequence at once. Their log-probabilities take one more forward pass."""
    return replace(described(function), whole_sequences=True)


def importance_weights(tokens: LossTokens, cap: float) -> Tensor:
    """Per token [tokens]: proximal over behaviour probability, at most `cap`, without a gradient."""
    return torch.exp(tokens.proximal - tokens.behaviour).clamp(max=cap).detach()


def mean_within(ids: Tensor, values: Tensor) -> Tensor:
    """Per token [tokens]: the mean over all tokens of the same id."""
    count = int(ids.max()) + 1 if len(ids) else 0
    sums = values.new_zeros(count).index_add(0, ids, values)
    sizes = values.new_zeros(count).index_add(0, ids, torch.ones_like(values))
    return (sums / sizes.clamp(min=1.0))[ids]


def k1(new: Tensor, reference: Tensor) -> Tensor:
    """Per token [tokens]: the gap. Right in the mean, but its gradient is 0 in expectation: for rewards, not for losses."""
    return new - reference


def k2(new: Tensor, reference: Tensor) -> Tensor:
    """Per token [tokens]: half the squared gap; its gradient is that of KL(new ‖ reference) in expectation."""
    return 0.5 * (new - reference).square()


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Per token [tokens]: an estimate of KL(new ‖ reference) that is never negative, for tokens sampled from `new`."""
    gap = reference - new
    return torch.exp(gap) - 1.0 - gap


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
"""Of KL(new ‖ reference), http://joschu.net/blog/kl-approx.html."""
