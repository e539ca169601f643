"""Statistics of rewards: unbiased pass@k, means with bootstrap intervals, and tests of paired differences. Pure."""

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

DRAWS = 2000
"""Draws of each bootstrap and permutation test: enough to fix the second digit of a 95 % interval."""
LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean over tasks, with a bootstrap interval over tasks."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """How much higher the second of two evaluations is on the same tasks."""

    value: float
    low: float
    high: float
    p: float
    """Two-sided p-value: the share of sign flips whose sum is at least as large."""


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """The chance that at least one of `k` attempts passes, from `attempts` of which `passed` did; unbiased for `k` <= `attempts`.

    >>> pass_at_k(4, 2, 1), round(pass_at_k(4, 2, 2), 4)
    (0.5, 0.8333)
    """
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of one value per task, with its bootstrap interval; of a single task it is the value itself."""
    low, high = _interval(tuple(values), seed)
    return Estimate(_mean(values), low, high)


def estimate_draws(values: Sequence[float]) -> Estimate:
    """The mean of a few draws. If all lie between 0 and 1 its interval is Wilson's, which is not empty where all are equal.

    >>> [round(bound, 3) for bound in estimate_draws([1.0, 1.0, 1.0, 1.0])]
    [1.0, 0.51, 1.0]
    """
    if not all(0.0 <= value <= 1.0 for value in values):
        return estimate(values)
    count, mean, z = len(values), _mean(values), NormalDist().inv_cdf((1.0 + LEVEL) / 2)
    centre, scale = (mean + z * z / (2 * count)) / (1 + z * z / count), 1 / (1 + z * z / count)
    reach = scale * z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return Estimate(mean, max(0.0, centre - reach), min(1.0, centre + reach))


def difference(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Difference:
    """Compare two evaluations of the same tasks, in the same order: paired, so that a task's difficulty cancels."""
    gains = [after - before for before, after in zip(first, second, strict=True)]
    low, high = _interval(tuple(gains), seed)
    return Difference(_mean(gains), low, high, _sign_flips(gains, seed))


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed, between two neighbours where it falls between them.

    >>> quantile([4.0, 1.0], 0.5), quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.95)
    (2.5, 4.8)
    """
    ranked, at = sorted(values), share * (len(values) - 1)
    low, high = ranked[math.floor(at)], ranked[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


@lru_cache(maxsize=16)
def _interval(values: tuple[float, ...], seed: int) -> tuple[float, float]:
    """Cached: with rewards of 0 and 1, reward and pass@1 have the same values, and the report computes them again."""
    draw, count = random.Random(seed), len(values)
    drawn = sorted(_mean(draw.choices(values, k=count)) for _ in range(DRAWS))
    edge = int(DRAWS * (1.0 - LEVEL) / 2)
    return drawn[edge], drawn[-edge - 1]


def _sign_flips(gains: Sequence[float], seed: int) -> float:
    """Exact for up to 12 tasks with a gain, sampled beyond; tasks without one do not matter."""
    gains = [gain for gain in gains if gain]
    observed = abs(sum(gains)) - 1e-12
    if len(gains) <= 12:
        sums = [
            sum(gain if pattern >> place & 1 else -gain for place, gain in enumerate(gains)) for pattern in range(1 << len(gains))
        ]
        return sum(abs(total) >= observed for total in sums) / len(sums)
    draw = random.Random(seed)
    extreme = sum(abs(sum(gain if draw.random() < 0.5 else -gain for gain in gains)) >= observed for _ in range(DRAWS))
    return (extreme + 1) / (DRAWS + 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
