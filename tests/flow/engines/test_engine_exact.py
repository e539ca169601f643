"""Every token of the embedded engine is sampled from what a plain forward pass over its whole context gives.

Random workloads: prompts that share prefixes, requests that join, leave, are cancelled and continued at any step, too little cache,
weights that change in between. Each token's log-probabilities are compared with the oracle under the weights of its version.
"""

import random

import pytest
import torch
from engine_workloads import SHAPE, Workload, make_weights

from penstock.engines.embedded.core import EngineCore, Request
from penstock.engines.embedded.decoder import Decoder, causal
from penstock.records import Sampling


@pytest.mark.parametrize("seed", range(12))
def test_random_workloads_are_exact(seed: int):
    rng = random.Random(seed)
    slots = rng.choice([1, 3, 8])
    cache = rng.choice([400 + 50 * slots, 600 * slots, 20_000])
    work = Workload(rng, slots, cache, pass_tokens=rng.choice([8, 64, 512]))
    work.play(40, swaps=seed % 2 == 1)
    assert work.check() > 50
    assert work.core.tree.tokens <= work.core.tree.capacity


def test_long_replies_outgrow_their_tails_exactly():
    work = Workload(random.Random(0), slots=4, cache_tokens=8000)
    for length in (5, 80, 5, 80):
        work.ask(work.system[:length] + work.tokens(3), Sampling(max_tokens=600 if length == 5 else 40))
    work.play(0, swaps=False)
    assert work.decoder.forwarded < 1280 + 200  # nothing was computed twice
    assert work.check() == 2 * 640


def test_requests_that_do_not_fit_together_take_turns_exactly():
    work = Workload(random.Random(1), slots=4, cache_tokens=700)
    for _ in range(8):
        work.ask(work.tokens(100), Sampling(max_tokens=120))
    work.play(0, swaps=False)
    assert work.decoder.forwarded > 8 * 219  # some were computed twice
    assert work.check() == 8 * 120


def test_a_group_is_prefilled_once():
    work = Workload(random.Random(2), slots=32, cache_tokens=30_000)
    groups = [work.system + work.tokens(15) for _ in range(4)]
    for prompt in groups * 8:
        work.ask(prompt, Sampling(max_tokens=3))
    work.step()
    work.step()
    assert work.decoder.forwarded == 300 + 4 * 14 + 32
    work.play(0, swaps=False)
    assert work.check() >= 32


def test_prompt_that_arrives_later_shares_what_running_ones_computed():
    work = Workload(random.Random(3), slots=4, cache_tokens=20_000)
    work.ask([*work.system, 1], Sampling(max_tokens=50))
    work.step()
    before = work.decoder.forwarded
    work.ask([*work.system[:250], 1, 2, 3], Sampling(max_tokens=50))
    work.step()
    assert work.decoder.forwarded - before == 2 + 2
    work.play(0, swaps=False)
    work.check()


def test_the_next_turn_prefills_its_new_tokens_only():
    work = Workload(random.Random(4), slots=2, cache_tokens=20_000)
    first = work.ask(work.system, Sampling(max_tokens=20))
    work.play(0, swaps=False)
    before = work.decoder.forwarded
    work.ask([*first.tokens, 5, 6, 7], Sampling(max_tokens=1))
    work.play(0, swaps=False)
    assert work.decoder.forwarded - before == 4  # the reply's last token, which nothing had followed yet, and the three new ones
    work.check()


def test_swap_computes_running_contexts_again_and_continues():
    work = Workload(random.Random(5), slots=4, cache_tokens=20_000)
    for _ in range(3):
        work.ask([*work.system, 1, 2], Sampling(max_tokens=30))
    for _ in range(10):
        work.step()
    before = work.decoder.forwarded
    work.swap()
    work.step()
    assert work.decoder.forwarded - before >= 300
    work.play(0, swaps=False)
    versions = [version for _, version in work.sampled[work.requests[0]]]
    assert versions == sorted(versions) and set(versions) == {0, 1}
    work.check()


def test_a_cancelled_request_frees_its_slot_at_the_next_step():
    work = Workload(random.Random(6), slots=1, cache_tokens=20_000)
    first = work.ask(work.tokens(20), Sampling(max_tokens=3000))
    second = work.ask(work.tokens(20), Sampling(max_tokens=5))
    work.step()
    work.core.cancel(first)
    work.step()
    assert len(work.sampled[second]) == 1
    work.play(0, swaps=False)
    assert [len(work.sampled[first]), len(work.sampled[second])] == [1, 5]


def test_a_long_prompt_does_not_stop_those_already_talking():
    work = Workload(random.Random(7), slots=2, cache_tokens=20_000, pass_tokens=64)
    talking = work.ask([1, 2], Sampling(max_tokens=100))
    work.step()
    work.ask(work.tokens(64 * 10), Sampling(max_tokens=1))
    for _ in range(10):
        work.step()
    assert len(work.sampled[talking]) == 11
    work.play(0, swaps=False)
    work.check()


def test_nothing_is_held_once_everybody_is_served():
    work = Workload(random.Random(8), slots=3, cache_tokens=2000, pass_tokens=32)
    work.play(80, swaps=True)
    work.swap()
    assert (work.core.tree.tokens, work.core.planned, work.core.running) == (0, [], [])
    for _ in range(3):
        work.ask([1, 2, 3], Sampling(max_tokens=1))
    work.step()
    assert all(work.sampled[request] for request in work.requests[-3:])


def test_bfloat16_weights_are_served_with_float32_sums():
    decoder = Decoder(SHAPE)
    decoder.load_state_dict(make_weights(0))
    decoder.bfloat16()
    core, prompt = EngineCore(decoder, slots=2, cache_tokens=20_000), list(range(1, 40))
    for key in range(2):
        core.submit(
            Request(key, [*prompt, *range(key, 40)], 39 + 40 - key, Sampling(max_tokens=20), frozenset(), random.Random(key).random)
        )
    while not core.idle:
        for chunk in core.step():
            ids = torch.tensor([chunk.request.tokens])
            with torch.inference_mode():
                logits = decoder.logits(decoder(ids, torch.arange(ids.shape[1])[None], causal))[0, -2]
            assert chunk.full_logprobs[0] == pytest.approx(logits.log_softmax(-1)[chunk.ids[0]].item(), abs=0.15)


def test_the_oracle_notices_a_cache_of_old_weights():
    work = Workload(random.Random(9), slots=2, cache_tokens=20_000)
    work.ask([*work.system, 1, 2], Sampling(max_tokens=30))
    for _ in range(10):
        work.step()
    work.version += 1
    work.decoder.load_state_dict(make_weights(1))  # without telling the core
    work.play(0, swaps=False)
    with pytest.raises(AssertionError):
        work.check()
