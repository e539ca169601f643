"""When "better than before" is established: a test that holds at whichever evaluation a run is looked at.

Each held-out task gives a difference: its reward now less its reward before. The evidence of one evaluation is the mean of what 19
gamblers own who each bet a fixed share on every difference, from an even start (Waudby-Smith and Ramdas, Estimating means of
bounded random variables by betting, arXiv 2010.09686). If the policy is not better, that is 1 in expectation, so it passes 1 / a
with probability a at most (Markov). Evaluations have the same tasks, and so their evidence must not be multiplied; instead the k-th
one since the last success gets a share of the 5 %, alpha / (k (k + 1)): the shares of all that may ever come add up to it.

Tasks must be a sample of those that matter and must not be trained on, and rewards must lie in `train.reward_range`.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

ALPHA = 0.05
"""The probability that a policy which is not better is ever called so."""
BETS = tuple(share / 20 for share in range(1, 20))
"""Shares of what a gambler owns."""


class SequentialResult(NamedTuple):
    """One evaluation, compared with the policy that was the best established before it."""

    evaluation: str
    """Such as `during-8`."""
    against: str
    """The evaluation of the policy that it is compared with."""
    difference: float
    """Mean over the tasks."""
    evidence: float
    """How many times as likely as not; see `log_evidence`."""
    needed: float
    better: bool
    """Whether it is established that the policy is better."""


def log_evidence(differences: Sequence[float]) -> float:
    """Returns the logarithm of the evidence that the mean of the differences, each from -1 to 1, is above 0.

    >>> round(math.exp(log_evidence([1.0])), 3)  # the mean of 1.05, 1.10, … 1.95
    1.5
    """
    owned = [sum(math.log1p(bet * difference) for difference in differences) for bet in BETS]
    most = max(owned)
    return most + math.log(sum(math.exp(each - most) for each in owned) / len(owned))


def sequential_results(rewards: Mapping[str, Sequence[float]], reward_range: tuple[float, float]) -> list[SequentialResult]:
    """Returns the result of each evaluation after the first, in the order given; `rewards` are those of the tasks, in their order.

    Once a policy is better, later ones are compared with it, with all of the 5 % again. ValueError if a reward is not in range.
    """
    low, high = reward_range
    if outside := [reward for each in rewards.values() for reward in each if not low <= reward <= high]:
        raise ValueError(f"a held-out reward of {outside[0]:g} is not in train.reward_range = [{low:g}, {high:g}]")
    found, against, looks = list[SequentialResult](), next(iter(rewards), ""), 0
    if not against.startswith("before"):  # that one was lost
        return []
    for _, name in pairwise(rewards):
        looks += 1
        gaps = [now - before for now, before in zip(rewards[name], rewards[against], strict=True)]
        evidence = math.exp(min(log_evidence([gap / (high - low) for gap in gaps]), 700.0))
        needed = looks * (looks + 1) / ALPHA
        better = evidence >= needed
        found.append(SequentialResult(name, against, sum(gaps) / len(gaps), evidence, needed, better))
        if better:
            against, looks = name, 0
    return found
