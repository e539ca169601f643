"""Training on a GPU: updates of a tree, compiled in bfloat16, have the gradients of the flat path, and a run in bfloat16 learns.

Relative errors (norm of the difference over norm of the result, the worst parameter): 1e-4 in float32; 0.08 in bfloat16, where the
flat path itself differs by 0.04 from float32.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_only import NEEDS_GPU
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from penstock.config import TrainSection, load_config
from penstock.engines.embedded.decoder import Decoder, DecoderShape
from penstock.records import Sequence
from penstock.run.inputs import read_inputs
from penstock.train.batches import Batch, Pass, pack
from penstock.train.learner import Learner
from penstock.train.precision import MasterWeights, round_to_bfloat16
from penstock.train.trainer import train
from penstock.train.tree_forward import PathMask, TreeForward, path_mask, tree_mask

pytestmark = NEEDS_GPU

VOCAB = 1009
SHAPE = DecoderShape(
    vocab_size=VOCAB, hidden=256, inner=512, layers=3, heads=4, kv_heads=2, head_dim=64, context_length=4096, qk_norm=True
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "multiply" / "tiny.toml"
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.08}


class MaskedForward(TreeForward):
    """Attends with a mask, whatever it costs."""

    def mask(self, one: Pass, trunk: int, *, padded: tuple[int, int]) -> BlockMask | Tensor:
        tree = tree_mask(one, trunk=trunk, padded=padded, device=self.decoder.device)
        return tree.blocks() if self.compiled else tree.dense()


class PathForward(TreeForward):
    def mask(self, one: Pass, trunk: int, *, padded: tuple[int, int]) -> PathMask:
        return path_mask(one, trunk=trunk, padded=padded, device=self.decoder.device)


class CompiledLearner(Learner):
    """Compiles what is in bfloat16 however small the batch is, and checkpoints a layer."""

    way: type[TreeForward] = TreeForward

    def _forward(self, decoder: Decoder, batch: Batch, *, states: bool = False) -> Any:
        if batch.flat:
            return super()._forward(decoder, batch, states=states)
        half = decoder.embed.weight.dtype == torch.bfloat16
        options = {"entropy_slopes": self.section.entropy > 0, "states": states}
        return self.way(decoder, compiled=half, logits_rows=300, checkpointed=lambda tokens: 1, **options)


def make_decoder(dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(SHAPE)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.06)
    return decoder.to("cuda", dtype)


def some_tree(seed: int, longest: int = 80) -> list[Sequence]:
    rng = random.Random(seed)
    made: list[Sequence] = []
    system = rng.choices(range(VOCAB), k=150)
    for group in range(3):
        prompt = system + rng.choices(range(VOCAB), k=rng.randrange(5, 60))
        for place in range(5):
            ids, trained = list(prompt), [False] * len(prompt)
            for _ in range(rng.randrange(1, 4)):
                reply, result = (rng.choices(range(VOCAB), k=rng.randrange(3, longest)) for _ in range(2))
                ids, trained = ids + result + reply, trained + [False] * len(result) + [True] * len(reply)
            credit, heat = rng.choice([-1.0, 0.5, 1.0]), rng.choice([0.7, 1.0])
            made.append(
                Sequence(
                    rollout_id=f"g{group}.{place}",
                    group_id=f"g{group}",
                    token_ids=tuple(ids),
                    trained=tuple(trained),
                    logprobs=tuple(-7.0 if flag else 0.0 for flag in trained),
                    temperatures=tuple(heat if flag else 1.0 for flag in trained),
                    advantages=tuple(credit if flag else 0.0 for flag in trained),
                    weight=1.0 / sum(trained),
                )
            )
    return made


def gradients(learner: Learner) -> dict[str, Tensor]:
    found = {name: value.grad for name, value in learner._masters.items()}  # pyright: ignore[reportPrivateUsage]
    return {name: grad.double().clone() for name, grad in found.items() if grad is not None}


def worst(given: dict[str, Tensor], oracle: dict[str, Tensor]) -> float:
    zero = torch.zeros((), dtype=torch.float64, device="cuda")
    return max(float(torch.dist(given[name], grad) / torch.dist(grad, zero)) for name, grad in oracle.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [32768, 700])
@pytest.mark.parametrize("way", [MaskedForward, PathForward])
def test_gradients_are_those_of_the_flat_path_in_float32(dtype: torch.dtype, limit: int, way: type[TreeForward]):
    tree = some_tree(0)
    flat = Learner(make_decoder(torch.float32), TrainSection(grad_clip=1e9))
    flat.compute(pack(tree, rollouts=15, tokens_per_pass=4096, shared_prefix=False))
    learner = CompiledLearner(make_decoder(torch.float32).to(dtype), TrainSection(grad_clip=1e9))
    learner.way = way
    learner.compute(pack(tree, rollouts=15, tokens_per_pass=limit))
    assert worst(gradients(learner), gradients(flat)) < TOLERANCES[dtype]


def test_other_trees_are_not_compiled_again():
    from torch._dynamo.utils import counters

    learner = CompiledLearner(make_decoder(torch.bfloat16), TrainSection())
    for seed in (0, 1):
        learner.compute(pack(some_tree(seed), rollouts=15, tokens_per_pass=32768))
    known = counters["stats"]["unique_graphs"]
    for seed in range(2, 6):
        learner.compute(pack(some_tree(seed), rollouts=15, tokens_per_pass=32768))
        learner.apply()
    assert counters["stats"]["unique_graphs"] <= known + 2  # those of a length not seen before


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_are_rounded_as_on_a_cpu(compiled: bool):
    values = torch.randn(100_000) * 0.1
    here, there = (round_to_bfloat16(values.to(device), seed=5, first=2**31 - 7).cpu() for device in ("cpu", "cuda"))
    assert torch.equal(here, there)
    served = {"a": values[:60_000].to("cuda", torch.bfloat16), "b": values[60_000:].to("cuda", torch.bfloat16)}
    for weight in served.values():
        weight.requires_grad_()
    MasterWeights(served, exact={"a": values[:60_000], "b": values[60_000:]}, seed=5).publish(compiled=compiled)
    wanted = round_to_bfloat16(values, seed=5, first=0)
    assert torch.equal(torch.cat([weight.detach().float().cpu() for weight in served.values()]), wanted)


def test_memory_that_runs_out_halves_the_passes():
    tree = some_tree(3, longest=400)
    learner = Learner(make_decoder(torch.bfloat16), TrainSection(grad_clip=1e9))
    batch = learner.pack(tree, rollouts=15)
    learner.compute(batch)
    oracle = gradients(learner)
    learner.zero()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 96 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        done = learner.compute(batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert done.metrics.memory_halvings >= 1
    assert worst(gradients(learner), oracle) < TOLERANCES[torch.bfloat16]


def test_a_run_with_default_settings_learns(tmp_path: Path):
    def silent(kind: str, fields: dict[str, Any]) -> None:
        """Nobody watches."""

    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text((EXAMPLE.parent / "tiny_heldout.jsonl").read_text() * 16)
    settings = (f'run.folder="{tmp_path}"', f'dataset.eval="{heldout}"', "dataset.eval_limit=128")
    config = load_config(EXAMPLE, settings)
    summary = asyncio.run(train(config, read_inputs(config, silent), listener=silent, stop=asyncio.Event()))
    assert summary.eval_before is not None and summary.eval_before < 0.5
    assert summary.eval_after is not None and summary.eval_after >= 0.9
    assert summary.exact_token_rate == 1.0
