"""Every advantage and every loss learns: real records, credit, batches and updates, around a decoder small enough for seconds.

Each rollout has two turns of two tokens. A turn is right if its first token is in the wanted half of the vocabulary, and each
turn wants another half. The rollout earns 1 if both are right; each step is graded too.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from training_cases import SHAPE, VOCAB

from penstock.config import TrainSection
from penstock.engines.embedded.decoder import Decoder, causal
from penstock.records import BranchPoint, End, Grade, Group, Node, Rollout, Sampling, Step, Task, make_rollout
from penstock.train.advantages import ADVANTAGES
from penstock.train.algorithm import Advantage, load_advantage
from penstock.train.credit import CreditedSequences, credit_groups
from penstock.train.learner import Learner
from penstock.train.losses import LOSSES
from penstock.train.sequences import no_replay

GROUPS, SIZE, STEPS, REPLY, BRANCHES = 4, 8, 14, 2, 4
SETTINGS: dict[str, dict[str, Any]] = {"pass_at_k": {"k": 2}, "gae": {"value_lr": 3e-2}}


def make_policy(seed: int) -> Decoder:
    torch.manual_seed(seed)
    decoder = Decoder(SHAPE)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return decoder


@torch.no_grad()
def reply(decoder: Decoder, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples the next tokens of each row; returns them and their log-probabilities."""
    logprobs: list[torch.Tensor] = []
    for _ in range(REPLY):
        hidden = decoder(ids, torch.arange(ids.shape[1]).expand(ids.shape), causal)[:, -1]
        scores = decoder.logits(hidden).log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1)
        logprobs.append(scores.gather(1, drawn))
        ids = torch.cat((ids, drawn), 1)
    return ids[:, -REPLY:], torch.cat(logprobs, 1)


def sample_groups(decoder: Decoder, number: int) -> list[Group]:
    prompts = [torch.tensor([[1, 2 + task]] * SIZE) for task in range(GROUPS)]
    ids, turns = torch.cat(prompts), list[tuple[torch.Tensor, torch.Tensor]]()
    for glue in ([], [0, 7]):
        ids = torch.cat((ids, torch.tensor([glue] * len(ids), dtype=torch.long)), 1)
        turns.append(reply(decoder, ids))
        ids = torch.cat((ids, turns[-1][0]), 1)
    groups: list[Group] = []
    for task in range(GROUPS):
        name = f"train-{number}-{task}"
        attempts = tuple(attempt(name, place, task, turns, task * SIZE + place) for place in range(SIZE))
        groups.append(Group(id=name, seq=number, task=Task(id=name, prompt=()), channel="train", rollouts=attempts))
    return groups


def attempt(group: str, place: int, task: int, turns: list[tuple[torch.Tensor, torch.Tensor]], row: int) -> Rollout:
    rollout = make_rollout(group, group, place)
    nodes = [((1, 2 + task), None), ((0, 7), 0)]
    steps, right = list[Step](), list[bool]()
    for index, (ids, logprobs) in enumerate(turns):
        tokens = tuple(ids[row].tolist())
        right.append((tokens[0] < VOCAB // 2) == (index == 0))
        steps.append(
            Step(
                rollout_id=rollout.id,
                index=index,
                node=index,
                transcript="main",
                completion_ids=tokens,
                logprobs=tuple(logprobs[row].tolist()),
                versions=(0,) * REPLY,
                sampling=Sampling(),
                finish="stop",
                message={},
                messages_digest="",
            )
        )
    own = [Grade(rollout_id=rollout.id, reward=float(each), source="test", step=index) for index, each in enumerate(right)]
    whole = Grade(rollout_id=rollout.id, reward=float(all(right)), source="test")
    made = [
        Node(rollout_id=rollout.id, id=at, parent=parent, token_ids=ids, messages_digest="", messages=())
        for at, (ids, parent) in enumerate(nodes)
    ]
    return Rollout(ref=rollout, end=End.COMPLETED, nodes=tuple(made), steps=tuple(steps), grades=(whole, *own))


def branched(decoder: Decoder, group: Group) -> Group:
    """The group with continuations from the second turn of each rollout."""
    made = list[Rollout]()
    for each in group.rollouts:
        path = (*each.nodes[0].token_ids, *each.steps[0].completion_ids, *each.nodes[1].token_ids)
        second, _ = reply(decoder, torch.tensor([path] * BRANCHES))
        point = BranchPoint(rollout_id=each.ref.id, step=1)
        for place, tokens in enumerate(second.tolist()):
            right = each.steps[0].completion_ids[0] < VOCAB // 2 and tokens[0] >= VOCAB // 2
            rollout = make_rollout(f"{each.ref.id}.step1", group.id, place, channel="branch", branch=point)
            grade = Grade(rollout_id=rollout.id, reward=float(right), source="test")
            made.append(Rollout(ref=rollout, end=End.COMPLETED, grades=(grade,)))
    return replace(group, branches=tuple(made))


def credit_of(groups: Sequence[Group], section: TrainSection, learner: Learner, advantage: Advantage) -> CreditedSequences:
    return credit_groups(groups, section, advantage, learner, replay=no_replay)


class Learnt(NamedTuple):
    reward: float
    """Mean of the last rollouts."""
    policy: Decoder


@cache
def learnt(seed: int, *, teacher: Decoder | None = None, **changes: Any) -> Learnt:
    chosen = {key: dict(value) if key.endswith("_settings") else value for key, value in changes.items()}
    section = TrainSection.model_validate({"lr": 1e-2, "steps": STEPS, "updates_per_step": 2, **chosen})
    decoder = make_policy(seed)
    learner, found = Learner(decoder, section, teacher=teacher), list[float]()
    advantage = load_advantage(section)
    for number in range(STEPS):
        groups = sample_groups(decoder, number)
        if "branches" in advantage.needs:
            groups = [branched(decoder, group) for group in groups]
        found += [sum(group.rewards) / SIZE for group in groups]
        credit = credit_of(groups, section, learner, advantage)
        if not credit.sequences:
            continue
        batch = learner.pack(credit.sequences, rollouts=credit.counts["rollouts"], value_targets=credit.value_targets)
        update = None
        for _ in range(section.updates_per_step):
            update = learner.compute(batch, update and update.proximal)
            learner.apply(update)
    return Learnt(sum(found[-3 * GROUPS :]) / (3 * GROUPS), decoder)


def beats_control(**changes: Any) -> None:
    control, made = learnt(0, lr=0.0).reward, learnt(0, **changes).reward
    assert made > control + 0.3, f"{made:.2f}, without learning {control:.2f}"


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_every_advantage_learns(name: str):
    taught = {"teacher": learnt(1).policy} if name == "distill" else {}  # by what another start learnt from rewards
    beats_control(advantage=name, advantage_settings=tuple(SETTINGS.get(name, {}).items()), **taught)


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_loss_learns(name: str):
    beats_control(loss=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "gspo", "loss_settings": (("level", "turn"),)},
        {"kl": 0.01, "kl_estimator": "k1", "kl_in": "reward"},
        {"kl": 0.01, "kl_reference": "moving"},
        {"entropy": 0.003},
        {"optimizer": "muon"},
        {"optimizer": "adafactor", "lr": 3e-2},
        {"schedule": "cosine", "warmup_updates": 2},
        {"mean": "token"},
        {"overlong": (1, 100)},
    ],
    ids=str,
)
def test_it_learns_with_every_switch(changes: dict[str, Any]):
    beats_control(**changes)


def test_better_step_grade_moves_only_its_tokens():
    """The whole way from grade to gradient: what is added to it is the slope of those two tokens, in every weight."""
    settings = {"discount": 0.0, "baseline": "none"}
    section = TrainSection(advantage="rewards_to_go", advantage_settings=settings, grad_clip=1e9)
    decoder = make_policy(0)
    torch.manual_seed(1)
    group = sample_groups(decoder, 0)[0]
    chosen = group.rollouts[3]
    extra = Grade(rollout_id=chosen.ref.id, reward=1.0, source="test", step=1)
    better = replace(chosen, grades=(*chosen.grades, extra))
    raised = replace(group, rollouts=tuple(better if each is chosen else each for each in group.rollouts))
    before, after = gradient(decoder, section, group), gradient(decoder, section, raised)
    first, second = (step.completion_ids for step in chosen.steps)
    ids = torch.tensor([[1, 2, *first, 0, 7, *second]])
    scores = decoder.logits(decoder(ids, torch.arange(ids.shape[1])[None], causal)).log_softmax(-1)
    said = sum(scores[0, at - 1, ids[0, at]] for at in range(ids.shape[1] - REPLY, ids.shape[1]))
    truth = torch.autograd.grad(-said / (2 * REPLY) / SIZE, list(decoder.parameters()))  # a mean over its tokens, and over rollouts
    assert any(part.abs().max() > 1e-3 for part in truth)
    for old, new, wanted in zip(before, after, truth, strict=True):
        assert torch.allclose(new - old, wanted, atol=1e-6)


def gradient(decoder: Decoder, section: TrainSection, group: Group) -> list[torch.Tensor]:
    learner = Learner(decoder, section)
    credit = credit_of([group], section, learner, load_advantage(section))
    assert credit.counts["rollouts"] == SIZE
    learner.compute(learner.pack(credit.sequences, rollouts=SIZE))
    made = [each.grad.clone() if each.grad is not None else torch.zeros_like(each) for each in decoder.parameters()]
    decoder.zero_grad()
    return made
