"""The test of "better than before": by hand, under the null with a look at every evaluation, and where there is a gain."""

import math
import random

import pytest

from penstock.train.sequential_test import log_evidence, sequential_results

TASKS, LOOKS = 24, 20


def evaluations(rng: random.Random, rates: list[float]) -> dict[str, list[float]]:
    """Rewards of the same tasks, which differ in how hard they are, at each evaluation."""
    ease = [rng.random() for _ in range(TASKS)]
    return {
        f"{'during' if step else 'before'}-{step}": [float(rng.random() < min(1.0, rate * 2 * each)) for each in ease]
        for step, rate in enumerate(rates)
    }


def test_evidence_by_hand():
    assert log_evidence([]) == pytest.approx(0.0)
    assert math.exp(log_evidence([1.0, -1.0])) == pytest.approx(sum(1 - (n / 20) ** 2 for n in range(1, 20)) / 19)
    assert math.exp(log_evidence([0.5] * 2)) == pytest.approx(sum((1 + n / 40) ** 2 for n in range(1, 20)) / 19)
    assert log_evidence([-1.0] * 500) < 0 < log_evidence([0.2] * 500)


def test_a_policy_that_is_never_better_is_called_so_in_at_most_5_of_100_runs_with_a_look_at_every_evaluation():
    rng = random.Random(0)
    runs = 400
    wrong = sum(
        any(result.better for result in sequential_results(evaluations(rng, [0.4] * (LOOKS + 1)), (0.0, 1.0))) for _ in range(runs)
    )
    assert wrong / runs <= 0.05


def test_a_single_evaluation_is_held_to_its_share():
    rng = random.Random(1)
    wrong = sum(sequential_results(evaluations(rng, [0.4, 0.4]), (0.0, 1.0))[0].better for _ in range(2000))
    assert wrong / 2000 <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / 2000)


def test_a_gain_is_found_and_then_the_next_policy_is_compared_with_it():
    rewards = {"before-0": [0.0] * 20, "during-2": [0.0] * 18 + [1.0] * 2, "during-4": [1.0] * 20, "after-6": [1.0] * 20}
    first, second, third = sequential_results(rewards, (0.0, 1.0))
    assert (first.better, second.better, third.better) == (False, True, False)
    assert (first.needed, second.needed, third.needed) == pytest.approx((40.0, 120.0, 40.0))
    assert (second.against, third.against) == ("before-0", "during-4") and second.difference == 1.0
    assert first.evidence == pytest.approx(sum((1 + n / 20) ** 2 for n in range(1, 20)) / 19)


def test_rewards_are_scaled_by_their_range_and_refused_outside_of_it():
    rewards = {"before-0": [0.0] * 9, "after-1": [10.0] * 9}
    [wide] = sequential_results(rewards, (0.0, 10.0))
    [narrow] = sequential_results({"before-0": [0.0] * 9, "after-1": [1.0] * 9}, (0.0, 1.0))
    assert wide.evidence == pytest.approx(narrow.evidence) and wide.difference == 10.0
    assert sequential_results({"during-1": [0.0], "after-2": [1.0]}, (0.0, 1.0)) == []  # nothing is known of before
    with pytest.raises(ValueError, match=r"a held-out reward of 10 is not in train.reward_range = \[0, 1\]"):
        sequential_results(rewards, (0.0, 1.0))
