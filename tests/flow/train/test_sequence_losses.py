"""Losses of whole sequences, and credit of single steps: through both layouts, many passes and chunks, against plain autograd."""

from dataclasses import replace

import pytest
import torch
from test_gradients import assert_same
from torch import Tensor
from training_cases import VOCAB, compute, gradients, make_decoder, on_policy, plain_logprobs, random_tree, section

from penstock.config import TrainSection
from penstock.records import Sequence
from penstock.train import forward
from penstock.train.algorithm import load_loss
from penstock.train.batches import pack
from penstock.train.learner import Learner
from penstock.train.losses.base import LossTokens

WIDE = {"clip_low": 0.2, "clip_high": 0.3}


def oracle(learner: Learner, tree: list[Sequence], settings: TrainSection, proximal: dict[int, Tensor]) -> dict[str, Tensor]:
    """The gradients of the loss, by autograd over all sequences at once."""
    decoder, loss = learner.decoder, load_loss(settings)
    parts: list[LossTokens] = []
    weights: list[Tensor] = []
    for number, s in enumerate(tree):
        kept = torch.tensor(s.trained[1:])
        new = plain_logprobs(decoder, s)[kept].float()
        old = proximal.get(number, new.detach())
        ids = torch.full((int(kept.sum()),), number)
        parts.append(
            LossTokens(
                new, old, torch.tensor(s.logprobs[1:])[kept], torch.tensor(s.advantages[1:])[kept], ids, _turns(s, number)[kept]
            )
        )
        weights.append(torch.full((len(new),), s.weight))
    tokens = LossTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))
    rollouts = len({s.rollout_id for s in tree})
    total = torch.cat(weights) / rollouts @ loss(tokens).values
    return dict(zip(dict(decoder.named_parameters()), torch.autograd.grad(total, list(decoder.parameters())), strict=True))


def _turns(s: Sequence, number: int) -> Tensor:
    """Runs of trained tokens, numbered apart from those of other sequences."""
    trained = torch.tensor(s.trained).long()
    begins = trained.diff(prepend=torch.zeros(1, dtype=torch.long)).clamp(min=0)
    return number * 100 + begins.cumsum(0)[1:]


@pytest.mark.parametrize("level", ["sequence", "turn"])
@pytest.mark.parametrize(("limit", "shared"), [(10_000, True), (25, True), (25, False)])
def test_loss_of_sequences_has_its_gradients_however_batch_is_cut(
    level: str, limit: int, shared: bool, monkeypatch: pytest.MonkeyPatch
):
    decoder = make_decoder()
    tree = on_policy(decoder, random_tree(3))
    settings = section(loss="gspo", loss_settings={**WIDE, "level": level}, lr=1e-2)
    learner = Learner(decoder, settings)
    before = {number: plain_logprobs(decoder, s)[torch.tensor(s.trained[1:])].detach().float() for number, s in enumerate(tree)}
    monkeypatch.setattr(forward, "MAX_LOGITS", 3 * VOCAB)  # a chunk has three places, so no sequence is whole in one
    first = compute(learner, tree, limit=limit, shared=shared)
    assert_same(gradients(decoder), oracle(learner, tree, settings, {}))
    learner.apply()
    second = compute(learner, tree, limit=limit, shared=shared, proximal=first.proximal)
    assert_same(gradients(decoder), oracle(learner, tree, settings, before))
    assert second.metrics.ratio != pytest.approx(1.0, abs=1e-3) and second.metrics.clip_fraction > 0


def test_turns_of_a_sequence_are_distinguished_even_without_tokens_between():
    only = Sequence(
        rollout_id="r",
        group_id="g",
        token_ids=(1, 2, 3, 4),
        trained=(False, True, True, True),
        logprobs=(0.0,) * 4,
        temperatures=(1.0,) * 4,
        advantages=(0.0, 1.0, 1.0, 1.0),
        weight=1.0,
        steps=(-1, 0, 1, 1),
    )
    owners = pack([only, only], rollouts=1, tokens_per_pass=100).owners()
    assert owners.turn.tolist() == [-1, 0, 1, 1, -1, 2, 3, 3] and owners.sequence.tolist() == [-1, 0, 0, 0, -1, 1, 1, 1]


@pytest.mark.parametrize("shared", [True, False])
def test_step_reward_moves_only_its_tokens(shared: bool):
    """The gradient is that of the step's own tokens, to the last digit of every weight."""
    decoder = make_decoder()
    tree = [s for s in on_policy(decoder, random_tree(5)) if _turn_count(s) > 1]
    assert len(tree) > 2
    credited = [replace(s, advantages=_first_turn(s)) for s in tree]
    compute(Learner(decoder, section()), credited, limit=40, shared=shared)
    made = gradients(decoder)
    loss = torch.zeros(())
    for s, whole in zip(credited, tree, strict=True):
        own = torch.tensor(s.advantages[1:])
        assert 0 < int((own != 0).sum()) < sum(whole.trained)
        loss = loss - s.weight * (own * plain_logprobs(decoder, s)).sum() / len({each.rollout_id for each in tree})
    truth = torch.autograd.grad(loss, list(decoder.parameters()))
    assert_same(made, dict(zip(made, truth, strict=True)))


def _turn_count(s: Sequence) -> int:
    return sum(now and not before for now, before in zip(s.trained, (False, *s.trained), strict=False))


def _first_turn(s: Sequence) -> tuple[float, ...]:
    end = next(at for at in range(s.trained.index(True), len(s.trained)) if not s.trained[at])
    return tuple(value if at < end else 0.0 for at, value in enumerate(s.advantages))
