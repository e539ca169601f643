"""What old tokens, short rollouts and empty replies weigh in an update, in numbers worked by hand."""

import math
from dataclasses import replace

import pytest
import torch
from training_cases import compute, gradients, make_decoder, on_policy, random_tree, section

from penstock.codec import context_digest
from penstock.records import End, Grade, Group, Node, Rollout, Sampling, Sequence, Step, Task, make_rollout
from penstock.train.advantages.grpo import grpo
from penstock.train.batches import pack
from penstock.train.learner import Learner
from penstock.train.sequences import sequences


def older(made: list[Sequence], factor: float) -> list[Sequence]:
    """As if the engine's older weights had thought each trained token `factor` times less likely."""
    shift = math.log(factor)
    columns = [tuple(x - shift if flag else 0.0 for x, flag in zip(s.logprobs, s.trained, strict=True)) for s in made]
    return [replace(s, logprobs=column) for s, column in zip(made, columns, strict=True)]


@pytest.mark.parametrize(("factor", "weight"), [(0.5, 0.5), (1.5, 1.5), (40.0, 2.0)])
def test_stale_gradient_is_fresh_times_capped_weight(factor: float, weight: float) -> None:
    decoder = make_decoder()
    learner, fresh = Learner(decoder, section(importance_cap=2.0)), on_policy(decoder, random_tree(0))
    assert compute(learner, fresh, limit=60, shared=True).metrics.importance == pytest.approx(1.0, abs=1e-5)
    plain = gradients(decoder)
    assert compute(learner, older(fresh, factor), limit=60, shared=True).metrics.importance == pytest.approx(weight, abs=1e-5)
    for name, value in gradients(decoder).items():
        torch.testing.assert_close(value, weight * plain[name], rtol=1e-3, atol=1e-6)


def rollout_of(place: int, *replies: tuple[int, ...], reward: float) -> Rollout:
    """A conversation with a reply for each of these, every message one token."""
    rollout, nodes, steps, context = make_rollout("train-0", "t", place), list[Node](), list[Step](), list[int]()
    for index, reply in enumerate(replies):
        context += [9, *reply]
        parent = index - 1 if index else None
        nodes.append(Node(rollout_id=rollout.id, id=index, parent=parent, token_ids=(9,), messages_digest="", messages=()))
        made = Step(
            rollout_id=rollout.id,
            index=index,
            node=index,
            transcript="main",
            completion_ids=reply,
            logprobs=(-1.0,) * len(reply),
            versions=(0,) * len(reply),
            sampling=Sampling(),
            finish="stop",
            message={},
            messages_digest="",
            context_digest=context_digest(context),
        )
        steps.append(made)
    grades = (Grade(rollout_id=rollout.id, reward=reward, source="test"),)
    return Rollout(ref=rollout, end=End.COMPLETED, nodes=tuple(nodes), steps=tuple(steps), grades=grades)


def group_of(*attempts: Rollout) -> Group:
    return Group(id="train-0", seq=0, task=Task(id="t", prompt=()), channel="train", rollouts=attempts)


def test_group_is_compared_by_its_rollouts_many_steps_each_took() -> None:
    group = group_of(
        rollout_of(0, (1,), reward=1.0), rollout_of(1, (2,), (3,), (4,), (5,), reward=0.0), rollout_of(2, (6,), reward=0.0)
    )
    spread = math.sqrt(2) / 3  # of 1, 0, 0 around 1/3; over the six steps it would be that of 1, 0, 0, 0, 0, 0
    assert grpo(group) == pytest.approx([2 / 3 / spread, -1 / 3 / spread, -1 / 3 / spread], rel=1e-5)
    made = sequences(group, grpo(group)).sequences
    assert [sum(s.trained) * s.weight for s in made] == [1.0, 1.0, 1.0]  # and each weighs the same


def test_empty_reply_is_not_trained_and_no_row_is_padding() -> None:
    group = group_of(rollout_of(0, (1, 2, 3), reward=1.0), rollout_of(1, (), reward=0.0), rollout_of(2, (4,), (), reward=0.0))
    result = sequences(group, grpo(group))
    assert result.counts["masked.empty"] == 2
    batch = pack(result.sequences, rollouts=result.counts["rollouts"], tokens_per_pass=1024, shared_prefix=True)
    terms = [term for pass_set in batch.pass_sets for one in pass_set.passes for term in one.terms]
    assert len(terms) == batch.trained_tokens == 4
    assert {s.rollout_id for s in result.sequences} == {"train-0.0.1", "train-0.2.1"}
