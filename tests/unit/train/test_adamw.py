"""Our AdamW takes the steps of torch's, to the last bit, and does not import torch's compiler."""

import subprocess
import sys

import torch
from torch import Tensor

from penstock.train.optim import AdamW


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).requires_grad_() for name, size in (("a", (5, 7)), ("b", (3,)), ("c", (2,)))
    }


def set_gradients(weights: dict[str, Tensor], step: int) -> None:
    """`c` has none in the first step."""
    generator = torch.Generator().manual_seed(step)
    for name, weight in weights.items():
        weight.grad = None if name == "c" and step == 0 else torch.randn(weight.shape, generator=generator)


def test_steps_are_those_of_torch():
    ours, theirs = make_weights(), make_weights()
    optimizer = AdamW(ours, lr=1e-2, weight_decay=0.1)
    oracle = torch.optim.AdamW(list(theirs.values()), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(5):
        for weights in (ours, theirs):
            set_gradients(weights, step)
        optimizer.step()
        oracle.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), step
    assert {name: int(state["step"]) for name, state in optimizer.state.items()} == {"a": 5, "b": 5, "c": 4}


def test_loaded_state_continues_and_shares_no_memory():
    ours, other = make_weights(), make_weights()
    first, second = AdamW(ours, lr=1e-2, weight_decay=0.0), AdamW(other, lr=1e-2, weight_decay=0.0)
    set_gradients(ours, 1)
    first.step()
    second.load(first.state)
    with torch.no_grad():
        for name, weight in other.items():
            weight.copy_(ours[name])
    for optimizer, weights in ((first, ours), (second, other)):
        set_gradients(weights, 2)
        optimizer.step()
    assert all(torch.equal(ours[name], other[name]) for name in ours)


def test_a_learner_takes_a_step_without_importing_the_compiler():
    program = """
import sys, torch
from penstock.config import TrainSection
from penstock.engines.embedded.decoder import Decoder, DecoderShape
from penstock.records import Sequence
from penstock.train.learner import Learner
shape = DecoderShape(vocab_size=9, hidden=8, inner=8, layers=1, heads=1, kv_heads=1, head_dim=8, context_length=16)
learner = Learner(Decoder(shape), TrainSection())
one = dict(rollout_id="r", group_id="g", token_ids=(1, 2, 3), trained=(False, True, True), logprobs=(0.0, -2.0, -2.0))
made = Sequence(**one, temperatures=(1.0,) * 3, advantages=(0.0, 1.0, 1.0), weight=0.5)
learner.compute(learner.pack([made], rollouts=1))
learner.apply()
assert learner.updates == 1
assert "torch._dynamo" not in sys.modules, "imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
