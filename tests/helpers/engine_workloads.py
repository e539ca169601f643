"""Random workloads for the cores of the embedded engine, and the oracle that every sampled token is compared with."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.engines.embedded.core import DrawnChunk, EngineCore, Request
from penstock.engines.embedded.decoder import Attend, Decoder, DecoderShape, causal
from penstock.engines.embedded.paged_core import PagedCore
from penstock.engines.embedded.sampling import sample
from penstock.engines.token_sets import unpack_sets
from penstock.records import Sampling, TokenLogprobs

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


class DrawnToken(NamedTuple):
    id: int
    logprob: float
    full_logprob: float
    kept: bytes
    """What it was chosen from; empty if from all."""
    likely: TokenLogprobs


@dataclass
class Workload:
    """A core under random use, and everything that it sampled."""

    rng: random.Random
    slots: int
    cache_tokens: int
    pass_tokens: int = 512
    paged_steps: int = 0
    """With 1 or more, the paged core, which queues so many steps at a time."""
    device: str = "cpu"
    graphs: bool | None = None
    """Whether the paged core captures its work; None: on a GPU."""
    version: int = 0
    requests: list[Request] = field(default_factory=list[Request])
    finished: list[Request] = field(default_factory=list[Request])
    sampled: dict[Request, list[tuple[DrawnToken, int]]] = field(default_factory=dict[Request, list[tuple[DrawnToken, int]]])

    def __post_init__(self) -> None:
        self.decoder = CountingDecoder(SHAPE)
        self.decoder.load_state_dict(make_weights(0))
        self.decoder.to(self.device)
        if self.paged_steps:
            self.core = PagedCore(
                self.decoder, slots=self.slots, cache_tokens=self.cache_tokens, max_steps=self.paged_steps, graphs=self.graphs
            )
        else:
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
        likely = len(self.requests) % 3 * 4
        sampling = Sampling(max_tokens=self.rng.choice([1, 5, 30, 90]), stop_ids=(0,), top_logprobs=likely, **options)
        if len(prompt) + sampling.max_tokens <= self.core.capacity:
            self.ask(prompt, sampling)

    def step(self) -> None:
        self.record(self.core.step())

    def record(self, chunks: Sequence[DrawnChunk]) -> None:
        for chunk in chunks:
            truncated = chunk.request.sampling.truncated and chunk.request.sampling.temperature > 0.0
            assert len(chunk.kept) == len(chunk.ids) * truncated
            assert len(chunk.most_likely) == len(chunk.ids) * bool(chunk.request.sampling.top_logprobs)
            sets = chunk.kept or [b""] * len(chunk.ids), chunk.most_likely or [()] * len(chunk.ids)
            drawn = zip(chunk.ids, chunk.logprobs, chunk.full_logprobs, *sets, strict=True)
            self.sampled[chunk.request] += [(DrawnToken(*token), self.version) for token in drawn]
            if chunk.finish:
                self.finished.append(chunk.request)

    def swap(self) -> None:
        self.record(self.core.drain())
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
                if token.kept:
                    scaled = row / request.sampling.temperature
                    chosen_from = scaled[torch.from_numpy(unpack_sets([token.kept], VOCAB)[0])]
                    assert token.logprob == pytest.approx(float(scaled[token.id] - chosen_from.logsumexp(0)), abs=TOLERANCE)
                best = row.log_softmax(-1).topk(request.sampling.top_logprobs).values.tolist()
                assert [logprob for _, logprob in token.likely] == pytest.approx(best, abs=TOLERANCE)
                assert [row.log_softmax(-1)[other].item() for other, _ in token.likely] == pytest.approx(best, abs=TOLERANCE)
                checked += 1
        return checked


def sampled_from(logits: Tensor, sampling: Sampling, token: int) -> float:
    """Log-probability of `token` as `sampling` would draw it, reported from that of another token of the same truncated set.

    The unit tests hold the drawing itself against a plain version.
    """
    draw = sample(logits[None], [sampling], [0.5])
    if sampling.temperature == 0.0:
        return 0.0 if int(draw.ids[0]) == token else -torch.inf
    return draw.logprobs[0].item() + (logits[token] - logits[draw.ids[0]]).item() / sampling.temperature
