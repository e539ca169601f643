"""The engine on a GPU, with captured steps, samples from what a plain forward pass over the whole context gives.

In float32 the forward pass is the CPU's, and log-probabilities differ by less than 1e-3, as on the CPU. In bfloat16 it is the GPU's
own, in bfloat16 too: both round, at different places, so a log-probability differs by the noise of bfloat16 and the mean is held.
"""

import asyncio
import random

import pytest
import torch
from engine_workloads import Workload
from gpu_only import NEEDS_GPU
from grammar_cases import Model, replies

from penstock.engines.embedded.core import Request
from penstock.engines.embedded.decoder import Decoder, DecoderShape, causal
from penstock.engines.embedded.lanes import DrawKind
from penstock.engines.embedded.paged_core import PagedCore
from penstock.records import Sampling

pytestmark = NEEDS_GPU

SHAPE = DecoderShape(
    vocab_size=5000, hidden=256, inner=512, layers=6, heads=8, kv_heads=2, head_dim=64, context_length=32768, rope_theta=100000.0
)


@pytest.mark.parametrize("seed", range(6))
def test_random_workloads_are_exact(seed: int):
    rng = random.Random(seed)
    slots = rng.choice([1, 3, 8, 40])
    cache = rng.choice([400 + 50 * slots, 600 * slots, 20_000])
    work = Workload(rng, slots, cache, pass_tokens=rng.choice([8, 64, 512]), paged_steps=rng.choice([1, 3, 8]), device="cuda")
    work.play(40, swaps=seed % 2 == 1)
    assert work.check() > 50
    assert work.core.lanes.captured_passes
    assert work.core.lanes.captured


def test_new_weights_are_used_without_another_capture():
    work = Workload(random.Random(5), slots=4, cache_tokens=20_000, paged_steps=4, device="cuda")
    for _ in range(3):
        work.ask([*work.system, 1, 2], Sampling(max_tokens=60))
    for _ in range(4):
        work.step()
    captured = dict(work.core.lanes.captured)
    for _ in range(3):
        work.swap()
        work.step()
        work.step()
    work.play(0, swaps=False)
    assert {version for _, version in work.sampled[work.requests[0]]} == {0, 1, 2, 3}
    assert captured
    assert work.core.lanes.captured == captured
    assert work.check() == 180


def test_a_warm_engine_captures_nothing_for_its_first_requests():
    work = Workload(random.Random(6), slots=8, cache_tokens=20_000, paged_steps=4, device="cuda")
    work.core.warm_up()
    captured, passes = dict(work.core.lanes.captured), dict(work.core.lanes.captured_passes)
    assert sorted(captured) == [(lanes, DrawKind()) for lanes in (1, 2, 4, 8)]
    for length in (10, 80, 300, 7, 12):
        work.ask(work.system[:length], Sampling(max_tokens=20))
    work.play(0, swaps=False)
    assert work.core.lanes.captured == captured
    assert work.core.lanes.captured_passes == passes
    assert work.check() == 100


def test_warm_engine_captures_again_where_weights_have_moved():
    work = Workload(random.Random(7), slots=4, cache_tokens=20_000, paged_steps=4, device="cuda")
    work.core.warm_up()
    for parameter in work.decoder.parameters():
        parameter.data = parameter.data.clone()
    work.swap()
    assert not work.core.lanes.captured
    work.ask(work.system[:80], Sampling(max_tokens=20))
    work.play(0, swaps=False)
    assert work.core.lanes.captured
    assert work.check() == 20


def test_log_probabilities_in_bfloat16_up_to_long_contexts():
    decoder = random_decoder()
    core = PagedCore(decoder, slots=8, cache_tokens=80_000)
    rng = random.Random(0)
    head = rng.choices(range(SHAPE.vocab_size), k=30_000)
    requests = [
        Request(n, [*head[:n], n % 7], n + 1, Sampling(max_tokens=24), frozenset(), random.Random(n).random)
        for n in (5, 400, 5000, 30_000)
    ]
    drawn = play(core, requests)
    assert core.prefilled == 30_000  # the shorter ones are beginnings of the longest
    for request in requests:
        ids = torch.tensor([request.tokens], device="cuda")
        with torch.inference_mode():
            hidden = decoder(ids, torch.arange(ids.shape[1], device="cuda")[None], causal)[0, request.prompt_length - 1 : -1]
            logprobs = decoder.logits(hidden).float().log_softmax(-1).gather(1, ids[0, request.prompt_length :, None])[:, 0]
        gaps = torch.tensor(drawn[request.key]) - logprobs.cpu()
        assert gaps.abs().mean() < 0.03, request.prompt_length


def test_replies_repeat_by_seed_with_the_prompt_cached_or_not():
    core = PagedCore(random_decoder(), slots=8, cache_tokens=80_000)
    prompt = random.Random(1).choices(range(SHAPE.vocab_size), k=700)
    replies: list[list[int]] = []
    for key in range(3):
        request = Request(key, list(prompt), len(prompt), Sampling(max_tokens=50), frozenset(), random.Random(7).random)
        play(core, [request])
        replies.append(request.tokens)
    assert replies[0] == replies[1] == replies[2]


def test_constrained_replies_are_those_of_the_cpu():
    model = Model.load()
    samplings = model.samplings(40)
    expected = asyncio.run(replies(model.engine(paged=False), model, samplings, together=True))
    found = asyncio.run(replies(model.engine(paged=True, device="cuda"), model, samplings, together=True))
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0] and one[2] == other[2]
        assert one[1] == pytest.approx(other[1], abs=1e-3)


def random_decoder() -> Decoder:
    torch.manual_seed(0)
    with torch.device("cuda"):
        decoder = Decoder(SHAPE)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.05)
    return decoder.bfloat16()


def play(core: PagedCore, requests: list[Request]) -> dict[int, list[float]]:
    """Serve them; returns the log-probabilities of each one's tokens."""
    drawn: dict[int, list[float]] = {request.key: [] for request in requests}
    for request in requests:
        core.submit(request)
    while not core.idle:
        for chunk in core.step():
            drawn[chunk.request.key] += chunk.full_logprobs
    return drawn
