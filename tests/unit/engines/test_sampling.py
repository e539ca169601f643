"""Sampling against numbers worked by hand, and against a slow, plain version of itself."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.embedded.sampling import sample
from penstock.records import Sampling

LOGITS = torch.tensor([[math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]])


def drawn(sampling: Sampling, uniform: float) -> tuple[int, float, float]:
    ids, logprobs, full, _ = sample(LOGITS, [sampling], [uniform])
    return int(ids[0]), math.exp(logprobs[0]), math.exp(full[0])


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.099, 0), (0.101, 1), (0.499, 1), (0.501, 2), (0.701, 3), (0.99999, 3)])
def test_uniform_number_picks_token_whose_share_it_falls_into(uniform: float, token: int):
    assert drawn(Sampling(), uniform)[0] == token


def test_untempered_tokens_have_their_plain_probability_twice():
    assert drawn(Sampling(), 0.3) == (1, pytest.approx(0.4), pytest.approx(0.4))


def test_temperature_changes_the_first_probability_only():
    squares = 0.1**2 + 0.4**2 + 0.2**2 + 0.3**2
    assert drawn(Sampling(temperature=0.5), 0.3) == (1, pytest.approx(0.16 / squares), pytest.approx(0.4))


def test_greedy_takes_the_best_token_with_certainty():
    assert drawn(Sampling(temperature=0.0), 0.99) == (1, 1.0, pytest.approx(0.4))


def test_top_k_keeps_the_k_best():
    assert drawn(Sampling(top_k=2), 0.0) == (1, pytest.approx(0.4 / 0.7), pytest.approx(0.4))
    assert drawn(Sampling(top_k=2), 0.99) == (3, pytest.approx(0.3 / 0.7), pytest.approx(0.3))


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    assert drawn(Sampling(top_p=0.69), 0.99) == (3, pytest.approx(0.3 / 0.7), pytest.approx(0.3))
    assert drawn(Sampling(top_p=0.71), 0.99) == (2, pytest.approx(0.2 / 0.9), pytest.approx(0.2))
    assert drawn(Sampling(top_p=0.01), 0.99) == (1, pytest.approx(1.0), pytest.approx(0.4))


def test_top_p_counts_what_top_k_left():
    # of 0.4 and 0.3 the first alone is 0.57 of the mass
    assert drawn(Sampling(top_k=2, top_p=0.57), 0.99) == (1, pytest.approx(1.0), pytest.approx(0.4))


def test_top_p_counts_what_min_p_drops_later():
    # of the three best, 0.4 alone is 0.44 of the mass; without the third, which min-p drops, it would be 0.57
    assert drawn(Sampling(top_k=3, top_p=0.5, min_p=0.7), 0.99) == (3, pytest.approx(0.3 / 0.7), pytest.approx(0.3))


def test_min_p_drops_what_is_unlikely_next_to_the_best():
    assert drawn(Sampling(min_p=0.6), 0.99) == (3, pytest.approx(0.3 / 0.7), pytest.approx(0.3))
    assert drawn(Sampling(min_p=1.0), 0.99) == (1, pytest.approx(1.0), pytest.approx(0.4))


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [3, 700]] = 0.0
    for uniform in (0.0, 0.49999, 0.5, 0.99999, math.nextafter(1.0, 0.0)):
        ids, logprobs, *_ = sample(logits, [Sampling()], [uniform])
        assert int(ids[0]) in (3, 700)
        assert math.exp(logprobs[0]) == pytest.approx(0.5)


def test_very_large_and_very_cold_logits_stay_finite():
    logits = torch.tensor([[1e30, 0.0, -1e30], [5.0, 5.0001, -5.0]])
    draw = sample(logits, [Sampling(), Sampling(temperature=1e-6)], [0.5, 0.5])
    assert draw.ids.tolist() == [0, 1]
    assert draw.logprobs.tolist() == pytest.approx([0.0, 0.0], abs=1e-3)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.0), Sampling(top_p=0.9)])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_give_nan_and_leave_other_rows_alone(sampling: Sampling, broken: float):
    logits = torch.zeros(2, 300)
    logits[0, 5] = broken
    draw = sample(logits, [sampling, Sampling()], [0.5, 0.5])
    assert math.isnan(draw.full_logprobs[0])
    assert draw.full_logprobs[1].item() == pytest.approx(-math.log(300))


def test_tokens_are_drawn_as_often_as_they_are_likely():
    rng = random.Random(0)
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(0)) * 2
    counts: Counter[int] = Counter()
    for _ in range(40):
        counts.update(sample(logits.expand(250, -1), [Sampling()] * 250, [rng.random() for _ in range(250)]).ids.tolist())
    for token, probability in enumerate(logits[0].softmax(-1).tolist()):
        deviation = math.sqrt(10_000 * probability * (1 - probability))
        assert abs(counts[token] - 10_000 * probability) < 6 * deviation + 3


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.8, 0.3]),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(samplings, min_size=1, max_size=6), st.integers(0, 10_000), st.sampled_from([3, 128, 300]), st.floats(0.1, 8.0))
def test_mixed_batch_rows_are_sampled_independently(rows: list[Sampling], seed: int, vocab: int, spread: float):
    rng = random.Random(seed)
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    draw = sample(logits, rows, [rng.random() for _ in rows])
    for row, sampling in enumerate(rows):
        token = int(draw.ids[row])
        assert draw.logprobs[row].item() == pytest.approx(math.log(plain(logits[row], sampling)[token]), abs=1e-4)
        assert draw.full_logprobs[row].item() == pytest.approx(logits[row].double().log_softmax(-1)[token].item(), abs=1e-4)


def plain(logits: torch.Tensor, sampling: Sampling) -> list[float]:
    """Probability of each token, one rule after the other, in float64."""
    if sampling.temperature == 0.0:
        return [float(i == int(logits.argmax())) for i in range(len(logits))]
    probs = (logits.double() / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: sampling.top_k or None]
    mass = sum(probs[i] for i in order)
    kept: list[int] = []
    while order and (not kept or sum(probs[i] for i in kept) < sampling.top_p * mass):
        kept.append(order.pop(0))
    kept = [i for i in kept if probs[i] >= sampling.min_p * probs[kept[0]]]
    mass = sum(probs[i] for i in kept)
    return [probs[i] / mass if i in kept else 0.0 for i in range(len(probs))]
