"""Advantages and losses of an installed package have the rights of those in our tables: every level, settings, needs and mean."""

import sys
from pathlib import Path

import pytest
import torch

from penstock.config import TrainSection
from penstock.errors import ConfigError
from penstock.records import End, Grade, Group, Rollout, Task, make_rollout
from penstock.train.algorithm import load_advantage, load_loss, mean_of
from penstock.train.losses.base import LossTokens

CODE = """
from penstock.config import Section
from penstock.train.advantages.base import mean_over, needing, over_batch, per_token
from penstock.train.losses.base import Loss, mean_within, whole_sequences

class Scale(Section):
    scale: float = 1.0

@mean_over("constant")
def scaled(group, settings: Scale):
    return [{0: settings.scale * reward} for reward in group.rewards]

@over_batch
def counted(groups):
    return [[{"main": float(len(groups))} for _ in group.graded] for group in groups]

@per_token("values")
def valued(sequences):
    return [[0.0] * len(each.values) for each in sequences]

@needing("branches")
def branched(group):
    return [float(len(group.branches)) for _ in group.graded]

@mean_over("token")
@whole_sequences
def of_turns(tokens, settings: Scale):
    ratio = mean_within(tokens.turns, tokens.new)
    return Loss(-settings.scale * ratio, ratio.detach(), ratio.detach(), ratio.detach())
"""
POINTS = """[penstock.advantage]
scaled = other_algorithms:scaled
counted = other_algorithms:counted
valued = other_algorithms:valued
branched = other_algorithms:branched

[penstock.loss]
of_turns = other_algorithms:of_turns
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` leaves behind, as far as entry points need it."""
    metadata = tmp_path / "other_algorithms-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-algorithms\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    (tmp_path / "other_algorithms.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_algorithms", raising=False)


def group() -> Group:
    rollouts = [make_rollout("g", "g", place) for place in range(2)]
    made = [
        Rollout(ref=each, end=End.COMPLETED, grades=(Grade(rollout_id=each.id, reward=float(place), source="test"),))
        for place, each in enumerate(rollouts)
    ]
    return Group(id="g", seq=0, task=Task(id="g", prompt=()), channel="train", rollouts=tuple(made))


def test_credit_by_step_with_settings():
    advantage = load_advantage(TrainSection(advantage="scaled", advantage_settings={"scale": 3.0}))
    assert advantage(group()) == [{0: 0.0}, {0: 3.0}]
    with pytest.raises(ConfigError, match="scale"):
        load_advantage(TrainSection(advantage="scaled", advantage_settings={"scal": 3.0}))


def test_credit_by_transcript_over_all_groups_of_a_step():
    advantage = load_advantage(TrainSection(advantage="counted"))
    assert advantage.level == "batch" and advantage([group(), group()]) == [[{"main": 2.0}] * 2] * 2


def test_value_head_and_branches_are_made_on_demand():
    valued, branched = (load_advantage(TrainSection(advantage=name)) for name in ("valued", "branched"))
    assert valued.level == "token" and valued.needs == {"values"}
    assert branched.needs == {"branches"} and branched(group()) == [0.0, 0.0]


def test_loss_of_turns_with_settings():
    loss = load_loss(TrainSection(loss="of_turns", loss_settings={"scale": 2.0}))
    logprobs, ids = torch.tensor([-1.0, -3.0, -5.0]), torch.tensor([0, 0, 1])
    assert loss.whole_sequences
    assert loss(LossTokens(logprobs, logprobs, logprobs, torch.ones(3), ids * 0, ids)).values.tolist() == [4.0, 4.0, 10.0]


def test_mean_follows_loss_then_advantage():
    assert mean_of(TrainSection(advantage="scaled", loss="of_turns")) == "token"
    assert mean_of(TrainSection(advantage="scaled")) == "constant"
    assert mean_of(TrainSection(advantage="counted")) == "rollout"
    assert mean_of(TrainSection(advantage="scaled", loss="of_turns", mean="rollout")) == "rollout"
    assert mean_of(TrainSection(advantage="dr_grpo")) == "constant" and mean_of(TrainSection(loss="dapo")) == "token"
