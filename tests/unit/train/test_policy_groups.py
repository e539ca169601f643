"""Credit by policy: each sees its own steps, and its own rewards transcripts, else the rollout's."""

from dataclasses import replace

import pytest

from penstock.records import End, Grade, Group, Mark, Node, Rollout, Sampling, Step, Task, make_rollout
from penstock.train.advantages.dr_grpo import dr_grpo
from penstock.train.credit import group_of
from penstock.train.learner import UpdateMetrics, total_metrics
from penstock.train.sequences import sequences


def grade(reward: float, transcript: str | None = None, step: int | None = None) -> Grade:
    return Grade(rollout_id="r", reward=reward, source="test", transcript=transcript, step=step)


def attempt(place: int, *grades: Grade, calls: str = "pe") -> Rollout:
    """A rollout that asks the planner (p) and the executor (e) in this order, each once for a letter, in paths of their own."""
    names = {"p": "planner", "e": "executor"}
    nodes, steps, last = [], [], dict[str, int]()
    for index, letter in enumerate(calls):
        nodes.append(Node(rollout_id="r", id=index, parent=last.get(letter), token_ids=(index,), messages_digest="", messages=()))
        steps.append(
            Step(
                rollout_id="r",
                index=index,
                node=index,
                transcript=names[letter],
                completion_ids=(10 + index, 20 + index),
                logprobs=(-1.0, -1.0),
                versions=(0, 0),
                sampling=Sampling(),
                finish="stop",
                message={},
                messages_digest="",
                policy=names[letter],
            )
        )
        last[letter] = index
    rollout = make_rollout("g", "t", place)
    return Rollout(ref=rollout, end=End.COMPLETED, nodes=tuple(nodes), steps=tuple(steps), grades=grades)


def group(*attempts: Rollout) -> Group:
    return Group(id="g", seq=0, task=Task(id="t", prompt=()), channel="train", rollouts=attempts)


@pytest.mark.parametrize(
    ("grades", "planner", "executor"),
    [
        ([grade(0.5)], 0.5, 0.5),
        ([grade(0.5), grade(1.0, "planner")], 1.0, 0.5),
        ([grade(0.2, "planner"), grade(0.8, "executor")], 0.2, 0.8),
        ([grade(0.2, "planner")], 0.2, 0.2),
        ([grade(0.25, step=0), grade(0.5, step=1), grade(1.0, step=2)], 1.25, 0.5),
        ([grade(0.25, step=0)], 0.25, 0.25),
        ([], None, None),
    ],
)
def test_policy_is_credited_with_its_own_transcripts_else_with_rollout(grades, planner, executor):
    whole = group(attempt(0, *grades, calls="pep"))
    assert [a.reward for a in group_of(whole, "planner").rollouts] == [planner]
    assert [a.reward for a in group_of(whole, "executor").rollouts] == [executor]


def test_each_policy_trains_its_own_tokens_against_its_own_baseline():
    whole = group(
        attempt(0, grade(1.0, "planner"), grade(0.0, "executor")),
        attempt(1, grade(0.0, "planner"), grade(0.0, "executor")),
        attempt(2, grade(0.5, "planner"), grade(3.0, "executor")),
    )
    made = {}
    for policy in ("planner", "executor"):
        view = group_of(whole, policy)
        made[policy] = sequences(view, dr_grpo(view))
    assert dr_grpo(group_of(whole, "planner")) == [0.5, -0.5, 0.0]
    assert dr_grpo(group_of(whole, "executor")) == [-1.0, -1.0, 2.0]
    assert [s.token_ids for s in made["planner"].sequences] == [(0, 10, 20)] * 2
    assert [s.token_ids for s in made["executor"].sequences] == [(1, 11, 21)] * 3


def test_rollouts_that_never_asked_policy_are_not_in_its_baseline():
    whole = group(attempt(0, grade(1.0)), attempt(1, grade(0.0), calls="p"), attempt(2, grade(0.0)))
    assert group_of(whole, "executor").rewards == [1.0, 0.0]
    assert group_of(whole, "planner").rewards == [1.0, 0.0, 0.0]
    assert not group_of(whole, "judge").rollouts


def test_marks_hold_for_the_policies_whose_steps_they_are_on():
    marks = (Mark(rollout_id="r", quality=0.5), Mark(rollout_id="r", step=1, trainable=False))
    whole = group(replace(attempt(0, grade(1.0)), marks=marks))
    assert group_of(whole, "planner").rollouts[0].marks == marks[:1]
    assert group_of(whole, "executor").rollouts[0].marks == marks


def test_metrics_of_several_updates_are_combined():
    one = UpdateMetrics(loss=1.0, grad_norm=3.0, entropy=1.0, logprob_gap=0.1, served_share=0.9, trained_tokens=30)
    other = UpdateMetrics(loss=-0.5, grad_norm=4.0, entropy=2.0, logprob_gap=0.2, served_share=1.0, trained_tokens=10)
    total = total_metrics([one, other])
    assert (total.loss, total.grad_norm, total.entropy) == (0.5, 5.0, 1.25)
    assert (total.logprob_gap, total.served_share, total.trained_tokens) == (0.2, 0.9, 40)
    assert total_metrics([one]) is one
    assert total_metrics([]) == UpdateMetrics()
