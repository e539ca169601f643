"""Every token of the embedded engine is sampled from what a plain forward pass over its whole context gives.

Random workloads: prompts that share prefixes, requests that join, leave, are cancelled and continued at any step, too little cache,
weights that change in between. Each token's log-probabilities are compared with the oracle under the weights of its version.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from penstock.engines.embedded.core import DrawnToken, EngineCore, Request
from penstock.engines.embedded.decoder import Attend, Decoder, DecoderShape, causal
from penstock.engines.embedded.sampling import sample
from penstock.records import Sampling

VOCAB = 50
SHAPE = DecoderShape(
    vocab_size=VOCAB,
    hidden=32,
    inner=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=8,
    context_length=4096,
    qkv_bias=True,
    qk_norm=True,
)
TOLERANCE = 1e-3
KINDS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=0.0),
    Sampling(temperature=1.3, top_k=7),
    Sampling(top_p=0.8),
    Sampling(temperature=0.9, top_p=0.9, min_p=0.05, top_k=30),
)


class CountingDecoder(Decoder):
    """Knows how many tokens went through it."""

    forwarded = 0

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.forwarded += ids.numel()
        return super().forward(ids, positions, attend)


def make_weights(seed: int) -> dict[str, Tensor]:
    """Random, and large enough that attention to far tokens changes the logits by far more than the tolerance."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) * 0.3 for name, p in Decoder(SHAPE).state_dict().items()}


@dataclass
class Workload:
    """A core under random use, and everything that it sampled."""

    rng: random.Random
    slots: int
    cache_tokens: int
    pass_tokens: int = 512
    version: int = 0
    requests: list[Request] = field(default_factory=list[Request])
    finished: list[Request] = field(default_factory=list[Request])
    sampled: dict[Request, list[tuple[DrawnToken, int]]] = field(default_factory=dict[Request, list[tuple[DrawnToken, int]]])

    def __post_init__(self) -> None:
        self.decoder = CountingDecoder(SHAPE)
        self.decoder.load_state_dict(make_weights(0))
        self.core = EngineCore(self.decoder, slots=self.slots, cache_tokens=self.cache_tokens)
        self.core.pass_tokens = self.core.tree.longest = self.pass_tokens
        self.system = self.tokens(300)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def ask(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        key = len(self.requests)
        request = Request(key, list(prompt), len(prompt), sampling, frozenset(sampling.stop_ids), random.Random(key).random)
        self.requests.append(request)
        self.sampled[request] = []
        self.core.submit(request)
        return request

    def ask_something(self) -> None:
        """A prompt that shares some of the system tokens, a sibling of an earlier request, or the next turn of a finished one."""
        kind = self.rng.random()
        if kind < 0.3 and self.finished:
            prompt = self.rng.choice(self.finished).tokens + self.tokens(self.rng.randint(1, 20))
        elif kind < 0.5 and self.requests:
            earlier = self.rng.choice(self.requests)
            prompt = earlier.tokens[: earlier.prompt_length]
        else:
            prompt = self.system[: self.rng.randint(0, 250)] + self.tokens(self.rng.randint(1, 12))
        template = self.rng.choice(KINDS)
        options = {name: getattr(template, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        sampling = Sampling(max_tokens=self.rng.choice([1, 5, 30, 90]), stop_ids=(0,), **options)
        if len(prompt) + sampling.max_tokens <= self.core.tree.capacity:
            self.ask(prompt, sampling)

    def step(self) -> None:
        for token in self.core.step():
            self.sampled[token.request].append((token, self.version))
            if token.finish:
                self.finished.append(token.request)

    def swap(self) -> None:
        self.version += 1
        self.decoder.load_state_dict(make_weights(self.version))
        self.core.reset()

    def play(self, steps: int, *, swaps: bool) -> None:
        """Random events before each step, then steps until everybody is served."""
        for _ in range(steps):
            if self.rng.random() < 0.35:
                self.ask_something()
            if self.requests and self.rng.random() < 0.04:
                self.core.cancel(self.rng.choice(self.requests))
            if swaps and self.rng.random() < 0.03:
                self.swap()
            self.step()
        while not self.core.idle:
            self.step()

    def check(self) -> int:
        """Compare every sampled token with the oracle; returns how many there were."""
        oracle, checked = Decoder(SHAPE), 0
        for version in range(self.version + 1):
            oracle.load_state_dict(make_weights(version))
            for request, sampled in self.sampled.items():
                if any(v == version for _, v in sampled):
                    checked += self._check_request(oracle, version, request, sampled)
        return checked

    def _check_request(self, oracle: Decoder, version: int, request: Request, sampled: list[tuple[DrawnToken, int]]) -> int:
        ids = torch.tensor([request.tokens])
        with torch.inference_mode():
            logits = oracle.logits(oracle(ids, torch.arange(ids.shape[1])[None], causal))[0]
        checked = 0
        for place, (token, served) in enumerate(sampled):
            if served == version:
                row = logits[request.prompt_length + place - 1]
                assert request.tokens[request.prompt_length + place] == token.id
                assert token.full_logprob == pytest.approx(row.log_softmax(-1)[token.id].item(), abs=TOLERANCE)
                assert token.logprob == pytest.approx(sampled_from(row, request.sampling, token.id), abs=TOLERANCE)
                checked += 1
        return checked


def sampled_from(logits: Tensor, sampling: Sampling, token: int) -> float:
    """Log-probability of `token` as `sampling` would draw it, told from that of another token of the same truncated set.

    The unit tests hold the drawing itself against a plain version.
    """
    draw = sample(logits[None], [sampling], [0.5])
    if sampling.temperature == 0.0:
        return 0.0 if int(draw.ids[0]) == token else -torch.inf
    return draw.logprobs[0].item() + (logits[token] - logits[draw.ids[0]]).item() / sampling.temperature


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


def test_a_prompt_that_arrives_later_shares_what_the_running_ones_computed():
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


def test_a_swap_computes_running_contexts_anew_and_goes_on():
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
        for token in core.step():
            ids = torch.tensor([token.request.tokens])
            with torch.inference_mode():
                logits = decoder.logits(decoder(ids, torch.arange(ids.shape[1])[None], causal))[0, -2]
            assert token.full_logprob == pytest.approx(logits.log_softmax(-1)[token.id].item(), abs=0.15)


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
