"""GAE: advantages of tokens against a learned value head. Generalized Advantage Estimation, arXiv 1506.02438."""

from collections.abc import Sequence

from pydantic import Field

from penstock.config import Section
from penstock.train.advantages.base import SequenceTokens, centred, per_token


class GaeSettings(Section):
    discount: float = Field(default=1.0, ge=0, le=1)
    """What a reward is worth one token earlier."""
    trace: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 1 trusts the rewards alone, 0 the value head alone beyond the next token."""
    value_lr: float = Field(default=1e-2, gt=0)
    """Learning rate of the value head: a linear layer on the last hidden states, which pass no gradient on to the policy."""
    value_updates: int = Field(default=8, ge=1)
    """Steps of the value head for each update of the policy."""
    normalise: bool = True
    """Standardise the advantages over all tokens of the batch."""


@per_token("values")
def gae(sequences: Sequence[SequenceTokens], settings: GaeSettings) -> list[list[float]]:
    """Sums of temporal differences, each a token earlier worth `discount * trace` of what it was."""
    made = [_estimate(tokens.rewards, tokens.values, settings) for tokens in sequences]
    if not settings.normalise:
        return made
    flat = iter(centred(value for each in made for value in each))
    return [[next(flat) for _ in each] for each in made]


def _estimate(rewards: list[float], values: list[float], settings: GaeSettings) -> list[float]:
    found, later, beyond = [0.0] * len(rewards), 0.0, 0.0
    for at in range(len(rewards) - 1, -1, -1):
        difference = rewards[at] + settings.discount * beyond - values[at]
        found[at] = later = difference + settings.discount * settings.trace * later
        beyond = values[at]
    return found
