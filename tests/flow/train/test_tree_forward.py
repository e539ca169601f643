"""The forward pass for GPUs, without compiled kernels: the gradients of the flat path, whatever is checkpointed or chunked."""

from dataclasses import replace

import pytest
import torch
from test_gradients import assert_same
from training_cases import SHAPE, UNTIED, compute, gradients, make_decoder, random_tree, section

from penstock.engines.embedded.decoder import Decoder, DecoderShape, causal
from penstock.errors import TrainError
from penstock.records import Sequence
from penstock.train.batches import Batch, Pass, PassRow, pack
from penstock.train.device import PassMemory
from penstock.train.forward import PassForward
from penstock.train.learner import Learner
from penstock.train.tree_forward import FASTER, PathMask, TreeForward, path_area, path_mask, tree_area, tree_mask


class PathForward(TreeForward):
    """Attends by paths, whatever they cost."""

    def mask(self, one: Pass, trunk: int, *, padded: tuple[int, int]) -> PathMask:
        return path_mask(one, trunk=trunk, padded=padded, device=self.decoder.device)


class TreeLearner(Learner):
    """Takes the way for GPUs on a CPU."""

    way: type[TreeForward] = TreeForward
    logits_rows, layers = 7, 0

    def _forward(self, decoder: Decoder, batch: Batch, *, states: bool = False) -> PassForward:
        if batch.flat:
            return super()._forward(decoder, batch, states=states)
        return self.way(
            decoder,
            compiled=False,
            logits_rows=self.logits_rows,
            checkpointed=lambda tokens: self.layers,
            entropy_slopes=self.section.entropy > 0,
            states=states,
        )


@pytest.mark.parametrize("shape", [SHAPE, UNTIED])
@pytest.mark.parametrize("limit", [1000, 40])
@pytest.mark.parametrize("checkpointed", [0, 2])
@pytest.mark.parametrize("way", [TreeForward, PathForward])
def test_gradients_are_those_of_the_flat_path(shape: DecoderShape, limit: int, checkpointed: int, way: type[TreeForward]):
    decoder, tree = make_decoder(shape), random_tree(limit + checkpointed)
    learner = TreeLearner(decoder, section(kl=0.1, entropy=0.3 if limit == 40 else 0.0))
    learner.layers, learner.way = checkpointed, way
    flat = compute(learner, tree, limit=60, shared=False)
    oracle = gradients(decoder)
    done = compute(learner, tree, limit=limit, shared=True)
    assert_same(gradients(decoder), oracle)
    for name in ("loss", "grad_norm", "entropy", "kl_reference", "ratio"):
        assert getattr(done.metrics, name) == pytest.approx(getattr(flat.metrics, name), rel=1e-4, abs=1e-6)


def test_the_blocks_of_a_mask_hold_all_that_is_read():
    """Block lists say which blocks a kernel must look at; within those, the mask decides."""
    learner = TreeLearner(make_decoder(), section())
    for pass_set in learner.pack(random_tree(1, groups=6, rollouts=8, system=40), rollouts=1).pass_sets:
        for one in pass_set.passes:
            time = -len(one.ids) % 128 + len(one.ids)
            mask = tree_mask(one, trunk=len(pass_set.trunk), padded=(128, time), device=torch.device("cpu"))
            blocks = mask.blocks()
            dense = mask.dense()
            listed = torch.zeros_like(dense)
            pairs = ((blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices))
            for counts, indices in pairs:
                assert counts is not None and indices is not None
                for row in range(dense.shape[0] // 128):
                    for at in map(int, indices[0, 0, row, : int(counts[0, 0, row])]):
                        listed[row * 128 : row * 128 + 128, at * 128 : at * 128 + 128] = True
            assert not (dense & ~listed).any()


def test_paths_cost_little_for_long_rollouts_and_much_for_branches():
    ids = list(range(40))
    long = [replace(one, token_ids=(*ids[:10], *([place] * 30))) for place, one in enumerate(_equal(4))]
    branches = [replace(one, token_ids=(*ids[:30], *([place] * 10))) for place, one in enumerate(_equal(4))]
    ratios: list[float] = []
    for sequences in (long, branches):
        [one] = pack(sequences, rollouts=4, tokens_per_pass=1000).pass_sets[0].passes
        ratios.append(path_area(one, 0) / tree_area(one))
    assert 1.0 <= ratios[0] < 1.2 and ratios[1] > FASTER


def test_paths_of_many_lengths_are_padded_to_a_few():
    """For each new length cuDNN prepares for a while."""
    padded: set[int] = set()
    for length in range(4097, 8193, 7):
        one = Pass(ids=(0,) * length, positions=tuple(range(length)), rows=(PassRow(start=0, stop=length),))
        [chunk] = path_mask(one, trunk=0, padded=(0, length), device=torch.device("cpu")).chunks
        assert length <= chunk.length < 1.04 * length
        padded.add(chunk.length)
    assert len(padded) == 32


def _equal(count: int) -> list[Sequence]:
    trained = (False,) * 39 + (True,)
    row = (0.0,) * 40
    return [
        Sequence(
            rollout_id=f"g.{place}",
            group_id="g",
            token_ids=(0,) * 40,
            trained=trained,
            logprobs=row,
            temperatures=(1.0,) * 40,
            advantages=row,
            weight=1.0,
        )
        for place in range(count)
    ]


class ShortOfMemory(TreeLearner):
    """Fails while passes are longer than what its memory holds."""

    holds = 30

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, section())
        self._memory = PassMemory(decoder)

    def _reserved(self) -> int:
        return 0

    def _forward(self, decoder: Decoder, batch: Batch, *, states: bool = False) -> PassForward:
        if batch.tokens_per_pass > self.holds:
            raise torch.OutOfMemoryError("out of memory")
        return super()._forward(decoder, batch, states=states)


def test_memory_that_runs_out_halves_passes_and_changes_no_result(caplog: pytest.LogCaptureFixture):
    decoder, tree = make_decoder(), random_tree(2)
    whole = compute(TreeLearner(decoder, section()), tree, limit=100, shared=True)
    oracle = gradients(decoder)
    learner = ShortOfMemory(decoder)
    done = compute(learner, tree, limit=100, shared=True)
    assert_same(gradients(decoder), oracle)
    assert done.metrics.memory_halvings == 2 and "halved" in caplog.text
    assert torch.allclose(done.proximal, whole.proximal, atol=1e-6)  # in the order of the batch that was given
    again = compute(learner, tree, limit=100, shared=True, proximal=done.proximal)
    assert again.metrics.ratio == pytest.approx(1.0, abs=1e-5)


def test_memory_that_is_far_too_small_is_one_line():
    learner = ShortOfMemory(make_decoder())
    learner.holds = 0
    with pytest.raises(TrainError, match=r"engine\.cache_tokens") as refused:
        compute(learner, random_tree(3), limit=1 << 20, shared=True)
    assert "\n" not in str(refused.value)


class TorchDynamoException(RuntimeError):
    """As torch names the errors of its compiler."""


class WithoutCompiler(TreeLearner):
    def _forward(self, decoder: Decoder, batch: Batch, *, states: bool = False) -> PassForward:
        if self._compilable:
            self._compiled = True
            raise TorchDynamoException("no C compiler was found\nin many lines")
        return super()._forward(decoder, batch)


def test_uncompilable_layers_run_uncompiled(caplog: pytest.LogCaptureFixture):
    decoder, tree = make_decoder(), random_tree(4)
    compute(TreeLearner(decoder, section()), tree, limit=100, shared=True)
    oracle = gradients(decoder)
    compute(WithoutCompiler(decoder, section()), tree, limit=100, shared=True)
    assert_same(gradients(decoder), oracle)
    assert [record.getMessage() for record in caplog.records] == [
        "layers cannot be compiled here, so updates are slower: no C compiler was found"
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_the_value_head_reads_the_same_states_on_every_way(shared: bool):
    decoder, tree = make_decoder(), random_tree(3)
    learner = TreeLearner(decoder, section(advantage="gae"))
    batch = pack(tree, rollouts=1, tokens_per_pass=40, shared_prefix=shared)
    found = learner._states(batch)  # pyright: ignore[reportPrivateUsage]
    order = batch.columns().token.argsort()
    ids = [torch.tensor([s.token_ids]) for s in tree]
    plain = [decoder(each, torch.arange(each.shape[1]).unsqueeze(0), causal)[0, :-1] for each in ids]
    truth = torch.cat([states[torch.tensor(s.trained[1:])] for states, s in zip(plain, tree, strict=True)])
    assert torch.allclose(found[torch.from_numpy(order)], truth, atol=1e-6)
