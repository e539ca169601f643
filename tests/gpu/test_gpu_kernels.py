"""Each Triton kernel gives what the same operation in plain torch gives, on the same GPU.

Relative errors (norm of the difference over norm of the result): 2e-5 in float32; 6e-3 in bfloat16, about one rounding.
"""

import random
from collections.abc import Callable

import pytest
import torch
from gpu_only import NEEDS_GPU
from torch import Tensor

from penstock.engines.embedded import fused
from penstock.engines.embedded.decoder import Decoder, DecoderShape
from penstock.engines.embedded.sampling import DrawnTokens

pytestmark = NEEDS_GPU

ROWS, TOKENS = 3000, 77
SMOL = DecoderShape(vocab_size=49152, hidden=576, inner=1536, layers=1, heads=9, kv_heads=3, head_dim=64, context_length=2048)
QWEN = DecoderShape(
    vocab_size=2048, hidden=1024, inner=3072, layers=1, heads=16, kv_heads=8, head_dim=128, context_length=2048, qk_norm=True
)
ODD = DecoderShape(
    vocab_size=300, hidden=40, inner=50, layers=1, heads=6, kv_heads=2, head_dim=24, context_length=512, qkv_bias=True
)


class Case:
    """A layer with random weights, and a cache with random rows."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype = shape, dtype
        self.decoder = Decoder(shape).to("cuda", dtype)
        with torch.no_grad():
            for parameter in self.decoder.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        self.layer = self.decoder.layers[0]
        size = (1, ROWS, shape.kv_heads, shape.head_dim)
        self.cache = fused.KeyValueRows(self.random(*size), self.random(*size))

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, device="cuda").to(self.dtype)

    def near(self, got: Tensor, want: Tensor) -> bool:
        return ((got - want).float().norm() / want.float().norm()).item() < (2e-5 if self.dtype == torch.float32 else 6e-3)


@pytest.fixture(  # each one compiles all kernels, a second or two apiece
    params=[(SMOL, torch.bfloat16), (QWEN, torch.bfloat16), (ODD, torch.float32)],
    ids=["smol-bfloat16", "qwen-bfloat16", "odd-float32"],
)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[object, object]]:
    """What a function gives with kernels, and what it gives without."""

    def run(function: Callable[[], object]) -> tuple[object, object]:
        with torch.inference_mode():
            fast = function()
            with monkeypatch.context() as patch:
                patch.setattr(fused, "kernels", None)
                return fast, function()

    return run


def test_norm_and_gate(case: Case, both: Callable[..., tuple[Tensor, Tensor]]):
    x, y, gate_up = (
        case.random(TOKENS, case.shape.hidden),
        case.random(TOKENS, case.shape.hidden),
        case.random(TOKENS, 2 * case.shape.inner),
    )
    weight = case.layer.norm1.weight
    assert case.near(*both(lambda: fused.add_norm(x.clone(), None, weight, 1e-5)))
    assert case.near(*both(lambda: fused.add_norm(x.clone(), y, weight, 1e-5)))
    assert case.near(*both(lambda: fused.gate(gate_up)))

    def added() -> Tensor:
        kept = x.clone()
        fused.add_norm(kept, y, weight, 1e-5)
        return kept

    assert case.near(*both(added))


@pytest.mark.parametrize("count", [1, 4096, 100_003])
def test_sums_of_gradients(count: int):
    total, part = torch.randn(count, device="cuda"), torch.randn(count, device="cuda").bfloat16()
    wanted = total + part
    assert torch.equal(fused.add_into(total, part), wanted)
    assert torch.equal(total, wanted)


def test_rotation_and_rows_of_the_cache(case: Case, both: Callable[..., tuple[list[Tensor], list[Tensor]]]):
    shape = case.shape
    qkv = case.random(TOKENS, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    positions, rows = torch.randint(0, 500, (TOKENS,), device="cuda"), torch.randperm(ROWS, device="cuda")[:TOKENS].int()

    def run() -> list[Tensor]:
        cache = fused.KeyValueRows(case.cache.keys.clone(), case.cache.values.clone())
        return [fused.rotate_store(case.decoder, case.layer, qkv, positions, rows, cache), *cache]

    assert all(case.near(got, want) for got, want in zip(*both(run), strict=True))


def test_decode_attention_in_one_part_and_in_several(case: Case, both: Callable[..., tuple[Tensor, Tensor]]):
    assert fused.kernels is not None
    keys, values = case.cache.keys[0], case.cache.values[0]
    for lanes in (3, 600):
        table = torch.randint(1, ROWS, (lanes, 512), device="cuda").int()
        lengths = torch.randint(1, 512, (lanes,), device="cuda").int()
        lengths[0] = 1
        q = case.random(lanes, case.shape.heads, case.shape.head_dim)
        assert case.near(*both(lambda q=q, table=table, lengths=lengths: fused.decode_attention(q, keys, values, table, lengths)))


def test_prefill_attention_over_packed_contexts(case: Case, both: Callable[..., tuple[Tensor, Tensor]]):
    per_block = fused.block_tokens(case.shape.heads, case.shape.kv_heads)
    context: list[int] = []
    blocks: list[tuple[int, int, int, int]] = []
    first = 0
    for start, count in ((0, 5), (7, 1), (100, 40), (33, per_block + 3), (700, 300)):
        begin = len(context)
        context += torch.randint(1, ROWS, (start + count,)).tolist()
        blocks += [(first + at, min(per_block, count - at), start + at, begin) for at in range(0, count, per_block)]
        first += count
    q = case.random(first, case.shape.heads, case.shape.head_dim)
    rows = (torch.tensor(part, device="cuda", dtype=torch.int32) for part in (context, blocks))
    packed = fused.PrefillBlocks(*rows)
    assert case.near(*both(lambda: fused.prefill_attention(q, case.cache.keys[0], case.cache.values[0], packed)))


def test_drawing(case: Case, both: Callable[..., tuple[DrawnTokens, DrawnTokens]]):
    rng = random.Random(0)
    logits = case.random(300, case.shape.vocab_size) * 3
    params = torch.tensor([[rng.choice([0.0, 0.7, 1.0, 1.3]), 0, 1.0, 0.0] for _ in range(300)], device="cuda")
    uniforms = torch.rand(300, device="cuda", dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, 1 - 1e-16
    got, want = both(lambda: fused.draw(logits, params, uniforms, truncated=False))
    same = got.ids == want.ids
    assert same.float().mean() > 0.99  # a number at the very border between two tokens may fall on either side
    assert torch.allclose(got.logprobs[same], want.logprobs[same], atol=1e-5)
    assert torch.allclose(got.full_logprobs[same], want.full_logprobs[same], atol=1e-5)
    logits[2, 7] = torch.nan
    broken = fused.draw(logits, params, uniforms, truncated=False).full_logprobs.isnan()
    assert broken.nonzero()[:, 0].tolist() == [2]


@pytest.mark.parametrize("vocab", [300, 49152])
def test_forbidden_tokens(vocab: int, both: Callable[..., tuple[Tensor, Tensor]]):
    torch.manual_seed(0)
    logits = torch.randn(5, vocab, device="cuda").bfloat16()
    allowed = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), device="cuda").int()
    allowed[0], allowed[1] = -1, 0

    def forbidden() -> Tensor:
        fused.forbid(changed := logits.clone(), allowed)
        return changed

    fast, plain = both(forbidden)
    assert torch.equal(fast, plain)
    assert torch.equal(fast[0], logits[0]) and fast[1].isneginf().all() and 0.4 < fast[2:].isneginf().float().mean() < 0.6
