"""How large a cache the embedded engine makes for itself on a GPU, and what it says where that does not fit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config import EmbeddedSection
from penstock.engines.embedded import engine, fused
from penstock.engines.embedded.decoder import Decoder, DecoderShape
from penstock.engines.embedded.engine import make_core
from penstock.engines.embedded.paged_core import free_tokens
from penstock.errors import ConfigError

SHAPE = DecoderShape(vocab_size=50, hidden=32, inner=48, layers=3, heads=6, kv_heads=2, head_dim=8, context_length=4096)
ROW = 2 * 3 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("free", "slots", "tokens"),
    [
        (30_000 * ROW, 1024, 10_000),
        (30_000 * ROW, 2, 8192),  # no more than both could fill
        (0, 1024, 4096),
    ],
)
def test_a_third_of_what_training_leaves(free: int, slots: int, tokens: int, monkeypatch: pytest.MonkeyPatch):
    decoder = Decoder(SHAPE)
    training = 16 * sum(parameter.numel() for parameter in decoder.parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free + (training if free else 0), 0))
    assert free_tokens(decoder, slots) == tokens


def test_a_cache_that_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused, "kernels", object())
    monkeypatch.setattr(engine, "PagedCore", full)
    decoder = SimpleNamespace(embed=SimpleNamespace(weight=SimpleNamespace(is_cuda=True)))
    with pytest.raises(ConfigError, match=r"engine\.cache_tokens"):
        make_core(decoder, EmbeddedSection(cache_tokens=9999))  # type: ignore[arg-type]
