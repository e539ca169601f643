"""pass@k, intervals and paired differences, against numbers worked by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.evals.metrics import difference, estimate, estimate_draws, pass_at_k, quantile


@pytest.mark.parametrize(
    ("attempts", "passed", "k", "expected"),
    [(5, 0, 1, 0.0), (5, 5, 3, 1.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (10, 3, 5, 1 - 21 / 252), (3, 1, 3, 1.0)],
)
def test_pass_at_k_is_what_one_counts(attempts, passed, k, expected):
    assert pass_at_k(attempts, passed, k) == pytest.approx(expected)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_share_of_choices_with_pass(attempts, draw):
    passed, k = draw.draw(st.integers(0, attempts)), draw.draw(st.integers(1, attempts))
    choices = list(itertools.combinations([True] * passed + [False] * (attempts - passed), k))
    assert pass_at_k(attempts, passed, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_interval_of_equal_values_is_a_point():
    assert estimate([0.5] * 7) == (0.5, 0.5, 0.5)
    found = estimate([0.0, 1.0] * 50)
    assert found.value == 0.5
    assert found.low == pytest.approx(0.4, abs=0.03) and found.high == pytest.approx(0.6, abs=0.03)  # 1.96 x 0.5 / sqrt(100)


def test_interval_of_few_draws_is_not_empty_where_are_equal():
    won, lost, half = estimate_draws([1.0] * 4), estimate_draws([0.0] * 4), estimate_draws([0.0, 1.0])
    z = 1.959964
    assert won == (1.0, pytest.approx(4 / (4 + z * z)), 1.0)
    assert lost == (0.0, 0.0, pytest.approx(1 - 4 / (4 + z * z)))
    assert half.high - 0.5 == pytest.approx(0.5 - half.low) and half.high == pytest.approx(0.905, abs=1e-3)
    assert estimate_draws([-1.0, 3.0]).value == 1.0  # of other rewards, by drawing again


def test_paired_difference_sees_what_is_the_same_in_every_task():
    first, second = [0.1 * n for n in range(10)], [0.1 * n + 0.05 for n in range(10)]
    found = difference(first, second)
    assert (found.value, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))
    assert found.p == 2 / 2**10  # only all signs equal are as extreme


def test_no_difference_is_never_significant():
    assert difference([1.0, 0.0, 1.0], [1.0, 0.0, 1.0]).p == 1.0
    assert difference([1.0, 0.0], [0.0, 1.0]) == pytest.approx((0.0, -1.0, 1.0, 1.0))


def test_many_tasks_are_judged_by_drawn_signs():
    one, other = [0.0] * 40, [1.0] * 30 + [0.0] * 10
    assert difference(one, other).p == 1 / 2001
    assert difference(one, [1.0, -1.0] * 20).p > 0.5


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0, 1.0, 2.0], 0.5, 2.0), ([4.0, 1.0], 0.5, 2.5), ([7.0], 0.95, 7.0), ([float(n) for n in range(101)], 0.95, 95.0)],
)
def test_a_quantile_lies_where_one_counts_to(values, share, expected):
    assert quantile(values, share) == pytest.approx(expected)
