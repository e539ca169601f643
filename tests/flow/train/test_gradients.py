"""The gradients of the trainer: shared prefixes against the flat path, and both against autograd written out plainly."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from training_cases import (
    SHAPE,
    UNTIED,
    VOCAB,
    compute,
    gradients,
    make_decoder,
    on_policy,
    plain_logprobs,
    random_tree,
    section,
)

from penstock.engines.embedded.decoder import DecoderShape, causal
from penstock.errors import TrainError
from penstock.records import Sequence
from penstock.train import forward
from penstock.train.batches import pack
from penstock.train.learner import Learner, UpdateMetrics


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert (value - b[name]).abs().max() <= 2e-6 * b[name].abs().max(), name


@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("limit", [10_000, 60, 12])
@pytest.mark.parametrize("seed", range(4))
def test_shared_prefixes_give_the_gradients_of_the_flat_path(seed: int, limit: int, shape: DecoderShape):
    decoder = make_decoder(shape)
    learner, tree = Learner(decoder, section()), random_tree(seed)
    flat = compute(learner, tree, limit=limit, shared=False)
    oracle = gradients(decoder)
    shared = compute(learner, tree, limit=limit, shared=True)
    assert_same(gradients(decoder), oracle)
    assert shared.metrics.forwarded_tokens < flat.metrics.forwarded_tokens
    assert shared.metrics.loss == pytest.approx(flat.metrics.loss, rel=1e-4)
    assert shared.metrics.entropy == pytest.approx(flat.metrics.entropy, rel=1e-4)


@pytest.mark.parametrize("system", [0, 30])
def test_trunk_per_batch_and_per_group_give_same_gradients(system: int):
    decoder, tree = make_decoder(), random_tree(7, system=max(system, 1), groups=2, rollouts=6)
    if not system:
        tree = [replace(s, token_ids=(int(s.group_id[1:]), *(t + 1 for t in s.token_ids[1:]))) for s in tree]
        tree = [replace(s, token_ids=tuple(t % VOCAB for t in s.token_ids)) for s in tree]
    batch = pack(tree, rollouts=12, tokens_per_pass=25)
    assert len(batch.pass_sets) == (1 if system else 2) and all(len(pass_set.passes) > 1 for pass_set in batch.pass_sets)
    learner = Learner(decoder, section())
    learner.compute(batch)
    made = gradients(decoder)
    learner.compute(pack(tree, rollouts=12, tokens_per_pass=25, shared_prefix=False))
    assert_same(made, gradients(decoder))


@pytest.mark.parametrize("shared", [True, False])
def test_on_policy_the_gradient_is_that_of_reinforce(shared: bool):
    decoder = make_decoder()
    tree = on_policy(decoder, random_tree(1))
    rollouts = len({s.rollout_id for s in tree})
    loss = torch.zeros(())
    for s in tree:
        credit = torch.tensor(s.advantages[1:])  # 0 where not trained
        loss = loss - s.weight * (credit * plain_logprobs(decoder, s)).sum() / rollouts
    oracle = dict(zip(dict(decoder.named_parameters()), torch.autograd.grad(loss, list(decoder.parameters())), strict=True))
    done = compute(Learner(decoder, section()), tree, limit=50, shared=shared)
    assert_same(gradients(decoder), oracle)
    assert done.metrics.importance == pytest.approx(1.0, abs=1e-5) and done.metrics.logprob_gap < 1e-4


@pytest.mark.parametrize("shared", [True, False])
def test_where_behaviour_is_unknown_learners_own_log_probability_is_used(shared: bool):
    decoder = make_decoder()
    known = on_policy(decoder, random_tree(1))
    oracle = compute(Learner(decoder, section()), known, limit=50, shared=shared).metrics
    wanted = gradients(decoder)
    unknown = [replace(s, logprobs=(0.0,) * len(s.trained), recomputed=s.trained) for s in known]
    done = compute(Learner(decoder, section()), unknown, limit=50, shared=shared).metrics
    assert_same(gradients(decoder), wanted)
    assert (done.importance, done.logprob_gap) == (1.0, 0.0) and done.loss == pytest.approx(oracle.loss, abs=1e-6)


def test_later_updates_on_a_batch_are_measured_from_its_first():
    decoder, tree = make_decoder(), random_tree(2)
    learner = Learner(decoder, section(lr=1e-2))
    first = compute(learner, tree, limit=60, shared=True)
    assert first.metrics.ratio == 1.0
    learner.apply()
    results: list[dict[str, Tensor]] = []
    for shared in (True, False):
        proximal = first.proximal if shared else _proximal_in_flat_order(first.proximal, tree)
        done = compute(learner, tree, limit=60, shared=shared, proximal=proximal)
        assert done.metrics.ratio != pytest.approx(1.0, abs=1e-3) and done.metrics.clip_fraction > 0
        results.append(gradients(decoder))
    assert_same(*results)


def _proximal_in_flat_order(proximal: Tensor, tree: list[Sequence]) -> Tensor:
    """The layouts order their terms differently; a term is known by what only it has: logprob and advantage."""
    batches = [pack(tree, rollouts=1, tokens_per_pass=60, shared_prefix=flag) for flag in (True, False)]
    keys = [[(t.logprob, t.target) for pass_set in b.pass_sets for p in pass_set.passes for t in p.terms] for b in batches]
    known = dict(zip(keys[0], proximal.tolist(), strict=True))
    return torch.tensor([known[key] for key in keys[1]])


def test_the_penalty_pulls_towards_the_start_policy_in_both_layouts():
    decoder, tree = make_decoder(), random_tree(3)
    learner = Learner(decoder, section(kl=0.5, lr=1e-2))
    at_start = compute(learner, tree, limit=60, shared=True)
    assert at_start.metrics.kl_reference == pytest.approx(0.0, abs=1e-9)
    learner.apply()
    moved = [(compute(learner, tree, limit=60, shared=flag).metrics.kl_reference, gradients(decoder)) for flag in (True, False)]
    assert_same(moved[0][1], moved[1][1])
    assert moved[0][0] == pytest.approx(moved[1][0], rel=1e-4) and moved[0][0] > 1e-3
    without = Learner(decoder, section())
    compute(without, tree, limit=60, shared=True)
    with pytest.raises(AssertionError):
        assert_same(gradients(decoder), moved[0][1])


@pytest.mark.parametrize("shared", [True, False])
def test_the_bonus_is_the_gradient_of_the_entropy(shared: bool):
    decoder, tree = make_decoder(), on_policy(make_decoder(), random_tree(1))
    silent = [replace(s, advantages=(0.0,) * len(s.advantages)) for s in tree]
    bonus = torch.zeros(())
    for s in silent:
        ids = torch.tensor([s.token_ids])
        hidden = decoder(ids, torch.arange(ids.shape[1]).unsqueeze(0), causal)[0, :-1]
        logprobs = (decoder.logits(hidden) / torch.tensor(s.temperatures[1:]).unsqueeze(1)).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1) * torch.tensor(s.trained[1:])
        bonus = bonus - 0.7 * s.weight * entropy.sum() / len({each.rollout_id for each in tree})
    truth = torch.autograd.grad(bonus, list(decoder.parameters()))
    compute(Learner(decoder, section(entropy=0.7)), silent, limit=50, shared=shared)
    assert_same(gradients(decoder), dict(zip(dict(decoder.named_parameters()), truth, strict=True)))


def test_a_moving_reference_is_copied_every_few_updates():
    decoder, tree = make_decoder(), random_tree(3)
    learner = Learner(decoder, section(kl=0.5, kl_reference="moving", reference_every=2, lr=1e-2))
    found: list[float] = []
    for _ in range(4):
        found.append(compute(learner, tree, limit=60, shared=True).metrics.kl_reference)
        learner.apply()
    assert found[0] == pytest.approx(0.0, abs=1e-9) and found[2] == pytest.approx(0.0, abs=1e-9)
    assert found[1] > 1e-4 and found[3] > 1e-4


def test_the_estimator_of_the_penalty_is_a_choice():
    decoder, tree = make_decoder(), random_tree(3)
    start = {name: value.clone() for name, value in decoder.state_dict().items()}
    found: dict[str, float] = {}
    for name in ("k2", "k3"):
        decoder.load_state_dict(start)
        learner = Learner(decoder, section(kl=0.5, kl_estimator=name, lr=1e-2))
        compute(learner, tree, limit=60, shared=True)
        learner.apply()
        found[name] = compute(learner, tree, limit=60, shared=True).metrics.kl_reference
    assert found["k2"] > 0 and found["k2"] != pytest.approx(found["k3"], rel=1e-3)


def test_logits_made_a_few_rows_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch):
    decoder, tree = make_decoder(), random_tree(4)
    learner = Learner(decoder, section())
    whole = compute(learner, tree, limit=1000, shared=True)
    oracle = gradients(decoder)
    monkeypatch.setattr(forward, "MAX_LOGITS", 3 * VOCAB)  # a bound that only real vocabularies reach
    pieces = compute(learner, tree, limit=1000, shared=True)
    assert_same(gradients(decoder), oracle)
    assert torch.allclose(whole.proximal, pieces.proximal, atol=1e-6)


def test_gradients_are_clipped_to_the_norm_asked_for():
    decoder, tree = make_decoder(), random_tree(5)
    done = compute(Learner(decoder, section(grad_clip=0.01)), tree, limit=1000, shared=True)
    norm = torch.stack([g.norm() for g in gradients(decoder).values()]).norm().item()
    assert done.metrics.grad_norm > 0.01 and norm == pytest.approx(0.01, rel=1e-3)


def test_only_apply_changes_the_weights():
    decoder, tree = make_decoder(), random_tree(6)
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    learner = Learner(decoder, section(lr=1e-3))
    compute(learner, tree, limit=1000, shared=True)
    assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items())
    learner.apply()
    assert not any(torch.equal(value, before[name]) for name, value in decoder.named_parameters())
    assert gradients(decoder) == {}


@pytest.mark.parametrize("poison", ["weight", "logprob"])
def test_what_is_not_finite_is_rejected_and_leaves_weights_alone(poison: str):
    decoder, tree = make_decoder(), random_tree(0)
    if poison == "weight":
        decoder.norm.weight.data[0] = float("nan")
    else:
        tree[0] = replace(tree[0], logprobs=tuple(float("nan") for _ in tree[0].logprobs))
    learner = Learner(decoder, section())
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    with pytest.raises(TrainError, match="nan"):
        compute(learner, tree, limit=1000, shared=True)
    learner.apply()
    assert all(torch.equal(value, before[name]) or poison == "weight" for name, value in decoder.state_dict().items())
    assert gradients(decoder) == {}


def test_an_empty_batch_changes_nothing():
    decoder = make_decoder()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    learner = Learner(decoder, section(lr=0.1, weight_decay=0.1))
    assert learner.compute(pack([], rollouts=0, tokens_per_pass=10)).metrics == UpdateMetrics()
    learner.apply()
    assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items())


def test_half_precision_weights_keep_steps_too_small_for_them():
    decoder, tree = make_decoder().bfloat16(), random_tree(8)
    learner = Learner(decoder, section(lr=2e-4))
    before = decoder.norm.weight.detach().float().clone()  # around 1, where bfloat16 has steps of 0.0078
    for _ in range(30):
        compute(learner, tree, limit=1000, shared=True)
        learner.apply()
    assert decoder.norm.weight.dtype == torch.bfloat16
    assert (decoder.norm.weight.float() - before).abs().max() > 3e-3
