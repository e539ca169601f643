import math
from dataclasses import replace
from typing import Any

import pytest

from penstock.config import TrainSection
from penstock.errors import ConfigError, TrainError
from penstock.records import BranchPoint, End, Grade, Group, Rollout, Sampling, Step, Task, make_rollout
from penstock.train.advantages import ADVANTAGES
from penstock.train.advantages.base import SequenceTokens, credit_by_step, described, over_batch
from penstock.train.advantages.dr_grpo import dr_grpo
from penstock.train.advantages.gae import GaeSettings, gae
from penstock.train.advantages.grpo import grpo
from penstock.train.advantages.maxrl import maxrl
from penstock.train.advantages.opo import opo
from penstock.train.advantages.pass_at_k import PassAtKSettings, pass_at_k
from penstock.train.advantages.reinforce_pp import ReinforcePlusPlusSettings, reinforce_pp
from penstock.train.advantages.rewards_to_go import RewardsToGoSettings, rewards_to_go
from penstock.train.advantages.rloo import rloo
from penstock.train.advantages.turn_grpo import TranscriptGrpoSettings, TurnGrpoSettings, transcript_grpo, turn_grpo
from penstock.train.advantages.vine import VineSettings, vine
from penstock.train.algorithm import load_advantage, settings_of
from penstock.train.credit import credit_of

OF_REWARDS = [name for name in ADVANTAGES if described(ADVANTAGES.load(name)).level != "token"]


def step(index: int, transcript: str = "main", tokens: int = 1) -> Step:
    return Step(
        rollout_id="r",
        index=index,
        node=index,
        transcript=transcript,
        completion_ids=(1,) * tokens,
        logprobs=(-1.0,) * tokens,
        versions=(0,) * tokens,
        sampling=Sampling(),
        finish="stop",
        message={"role": "assistant", "content": ""},
        messages_digest="",
    )


def graded(place: int, *grades: dict[str, Any], steps: tuple[Step, ...] = (step(0),)) -> Rollout:
    rollout = make_rollout("train-0", "t", place)
    made = tuple(Grade(rollout_id=rollout.id, source="test", **grade) for grade in grades)
    return Rollout(ref=rollout, end=End.COMPLETED, grades=made, steps=steps)


def group_of(*attempts: Rollout) -> Group:
    return Group(id="train-0", seq=0, task=Task(id="t", prompt=()), channel="train", rollouts=attempts)


def group(*rewards: float | None) -> Group:
    """A reward of None is a rollout that failed before it was graded."""
    attempts: list[Rollout] = []
    for place, reward in enumerate(rewards):
        rollout = make_rollout("train-0", "t", place)
        grades = () if reward is None else (Grade(rollout_id=rollout.id, reward=reward, source="test"),)
        end = End.AGENT_ERROR if reward is None else End.COMPLETED
        attempts.append(Rollout(ref=rollout, end=end, grades=grades, steps=(step(0),)))
    return group_of(*attempts)


def numbers(name: str, given: Group) -> list[float]:
    """The credit of each rollout's only step."""
    [credit] = credit_of(load_advantage(TrainSection(advantage=name)), [given])
    return [credit_by_step(attempt, each)[0] for attempt, each in zip(given.graded, credit, strict=True)]


def test_grpo_divides_by_the_population_deviation():
    # mean 1/4; deviations -1/4 x3, 3/4: variance (3/16 + 9/16) / 4 = 3/16
    spread = math.sqrt(3) / 4
    assert grpo(group(0, 0, 0, 1)) == pytest.approx([-0.25 / spread] * 3 + [0.75 / spread], rel=1e-5)


def test_dr_grpo_only_takes_the_mean_away():
    assert dr_grpo(group(0, 0, 0, 1)) == [-0.25, -0.25, -0.25, 0.75]


def test_rloo_compares_with_the_mean_of_the_others():
    # the others of the 1 have mean 0; those of a 0 have mean 1/3
    assert rloo(group(0, 0, 0, 1)) == pytest.approx([-1 / 3] * 3 + [1.0])


def test_opo_weighs_the_baseline_by_length():
    # a success of 6 tokens and a failure of 2: baseline 6 * 1 / 8
    long, short = graded(0, {"reward": 1.0}, steps=(step(0, tokens=6),)), graded(1, {"reward": 0.0}, steps=(step(0, tokens=2),))
    assert opo(group_of(long, short)) == pytest.approx([0.25, -0.75])


def test_maxrl_divides_by_the_mean():
    assert maxrl(group(0, 0, 0, 1)) == pytest.approx([-1.0, -1.0, -1.0, 3.0])
    assert maxrl(group(-1, 0)) == [0.0, 0.0]  # no success to make likelier


def test_pass_at_k_is_the_mean_over_all_subsets():
    # 4 attempts, 1 passes, k = 2: 3 of 6 pairs have it, so mean 1/2, deviation 1/2. Of the 3 pairs of a failure, 1 has it.
    assert pass_at_k(group(0, 0, 0, 1), PassAtKSettings(k=2)) == pytest.approx([(1 / 3 - 1 / 2) / 0.5] * 3 + [1.0])


def test_pass_at_k_teaches_nothing_once_every_subset_passes():
    assert pass_at_k(group(0, 1, 1, 1), PassAtKSettings(k=2)) == [0.0] * 4
    assert pass_at_k(group(0, 1), PassAtKSettings(k=1)) == pytest.approx([-1.0, 1.0])  # k = 1 is GRPO


def test_reinforce_pp_standardises_over_the_batch():
    # rewards 0, 2, 4, 6: mean 3, variance (9 + 1 + 1 + 9) / 4 = 5
    made = reinforce_pp([group(0, 2), group(4, 6)], ReinforcePlusPlusSettings())
    assert [*made[0], *made[1]] == pytest.approx([value / math.sqrt(5) for value in (-3, -1, 1, 3)], rel=1e-5)


def test_reinforce_pp_can_take_mean_of_group_away_first():
    made = reinforce_pp([group(0, 2), group(4, 10)], ReinforcePlusPlusSettings(group_baseline=True))
    # deviations -1, 1, -3, 3: mean 0, variance 20 / 4
    assert [*made[0], *made[1]] == pytest.approx([value / math.sqrt(5) for value in (-1, 1, -3, 3)], rel=1e-5)


def test_rewards_to_go_discounts_by_turn():
    # step grades 1, 0 and outcome 4 at discount 1/2: last 0 + 4, first 1 + 4 / 2
    steps = (step(0), step(1))
    only = graded(0, {"reward": 4.0}, {"reward": 1.0, "step": 0}, {"reward": 0.0, "step": 1}, steps=steps)
    settings = RewardsToGoSettings(discount=0.5, baseline="none")
    assert rewards_to_go(group_of(only), settings) == [{0: 3.0, 1: 4.0}]


def test_rewards_to_go_compares_steps_of_the_same_turn():
    steps = (step(0), step(1))
    a = graded(0, {"reward": 1.0, "step": 0}, {"reward": 1.0, "step": 1}, steps=steps)
    b = graded(1, {"reward": 0.0, "step": 0}, {"reward": 1.0, "step": 1}, steps=steps)
    assert rewards_to_go(group_of(a, b), RewardsToGoSettings()) == [{0: 0.5, 1: 0.0}, {0: -0.5, 1: 0.0}]
    # all four returns 2, 1, 1, 1 have mean 5/4
    assert rewards_to_go(group_of(a, b), RewardsToGoSettings(baseline="group")) == [{0: 0.75, 1: -0.25}, {0: -0.25, 1: -0.25}]


def test_turn_grpo_gives_step_part_and_outcome_to():
    steps = (step(0), step(1))
    a = graded(0, {"reward": 1.0}, {"reward": 0.0, "step": 0}, steps=steps)
    b = graded(1, {"reward": 0.0}, {"reward": 2.0, "step": 0}, steps=steps)
    made = turn_grpo(group_of(a, b), TurnGrpoSettings(outcome_weight=0.5))
    # standardised pairs are -1 and 1: outcome 0.5 * (1, -1) for both steps, turn 0 has (-1, 1) next to it
    assert made[0] == pytest.approx({0: 0.5 - 1.0, 1: 0.5}, rel=1e-5) and made[1] == pytest.approx(
        {0: -0.5 + 1.0, 1: -0.5}, rel=1e-5
    )


def test_transcript_grpo_compares_each_role_with_itself():
    steps = (step(0, "planner"), step(1, "executor"))
    a = graded(0, {"reward": 1.0, "transcript": "planner"}, {"reward": 5.0, "transcript": "executor"}, steps=steps)
    b = graded(1, {"reward": 0.0, "transcript": "planner"}, {"reward": 9.0, "transcript": "executor"}, steps=steps)
    made = transcript_grpo(group_of(a, b), TranscriptGrpoSettings(scaled=False))
    assert made == [{"planner": 0.5, "executor": -2.0}, {"planner": -0.5, "executor": 2.0}]


def test_gae_worked_by_hand():
    tokens = SequenceTokens("r", [0, 0, 0], [0.0, 0.0, 1.0], [-1.0] * 3, [0.5, 0.2, 0.4], [])
    settings = GaeSettings(discount=0.9, trace=0.5, normalise=False)
    # differences: 0.9 * 0.2 - 0.5 = -0.32; 0.9 * 0.4 - 0.2 = 0.16; 1 - 0.4 = 0.6; each earlier worth 0.45
    last, middle = 0.6, 0.16 + 0.45 * 0.6
    assert gae([tokens], settings) == [pytest.approx([-0.32 + 0.45 * middle, middle, last])]


def test_gae_with_full_trace_is_return_less_value():
    tokens = SequenceTokens("r", [0] * 3, [1.0, 0.0, 2.0], [-1.0] * 3, [0.5, 0.2, 0.4], [])
    assert gae([tokens], GaeSettings(trace=1.0, normalise=False)) == [pytest.approx([3 - 0.5, 2 - 0.2, 2 - 0.4])]


@pytest.mark.parametrize("name", OF_REWARDS)
@pytest.mark.parametrize("rewards", [(), (1.0,), (0.1, 0.1, 0.1), (0.7,) * 7])
def test_equal_rewards_give_exact_zeros(name: str, rewards: tuple[float, ...]):
    assert numbers(name, group(*rewards)) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", OF_REWARDS)
def test_ungraded_rollouts_have_no_advantage_and_no_part_in_mean(name: str):
    assert numbers(name, group(None, 0.0, None, 1.0)) == numbers(name, group(0.0, 1.0))


@pytest.mark.parametrize("name", OF_REWARDS)
def test_the_better_rollout_gets_more(name: str):
    *worse, better = numbers(name, group(0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    assert max(worse) < better


def test_a_tiny_spread_stays_finite():
    assert all(abs(value) <= 1.0 for value in grpo(group(1.0, 1.0 + 1e-15)))


def test_credit_for_what_a_rollout_has_not_is_refused():
    only = graded(0, {"reward": 1.0})
    with pytest.raises(TrainError, match="judge"):
        credit_by_step(only, {"judge": 1.0})
    with pytest.raises(TrainError, match="credit"):
        credit_by_step(only, {3: 1.0})


def test_an_unknown_setting_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"\[train\.advantage_settings\]"):
        load_advantage(TrainSection(advantage="rewards_to_go", advantage_settings={"discont": 0.5}))


def test_settings_of_an_advantage_without_any_are_refused():
    with pytest.raises(ConfigError, match="grpo"):
        load_advantage(TrainSection(advantage="grpo", advantage_settings={"scale": 1}))


def plain(group: Group) -> list[float]:
    """As a plug-in of before settings and levels."""
    return [1.0 for _ in group.graded]


@over_batch
def counted(groups: list[Group]) -> list[list[float]]:
    return [[float(len(groups))] * len(group.graded) for group in groups]


def test_plug_ins_are_functions_of_group_or_of_batch():
    both = [group(0.0, 1.0), group(1.0)]
    old, new = (load_advantage(TrainSection(advantage=f"{__name__}:{name}")) for name in ("plain", "counted"))
    assert [old(each) for each in both] == [[1.0, 1.0], [1.0]] and new(both) == [[2.0, 2.0], [2.0]]


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_every_advantage_names_its_paper_and_works_without_settings(name: str):
    function = described(ADVANTAGES.load(name)).function
    module = __import__(function.__module__, fromlist=["x"])
    assert "arXiv" in (module.__doc__ or "") or "Williams" in (module.__doc__ or "")
    kind = settings_of(function)
    assert kind is None or not any(field.is_required() for field in kind.model_fields.values())


def branch_of(attempt: Rollout, index: int, *rewards: float | None) -> tuple[Rollout, ...]:
    """Continuations from a step; None is one that is void."""
    point, made = BranchPoint(rollout_id=attempt.ref.id, step=index), list[Rollout]()
    for place, reward in enumerate(rewards):
        rollout = make_rollout(f"{attempt.ref.id}.step{index}", "t", place, channel="branch", branch=point)
        grades = () if reward is None else (Grade(rollout_id=rollout.id, reward=reward, source="test"),)
        end = End.BRANCH_DIVERGED if reward is None else End.COMPLETED
        made.append(Rollout(ref=rollout, end=end, grades=grades))
    return tuple(made)


def test_vine_gives_each_call_what_it_added_to_the_value():
    calls = (step(0), step(1), step(2))
    won, lost = graded(0, {"reward": 1.0}, steps=calls), graded(1, {"reward": 0.0}, steps=calls)
    # Before the first call both are worth the mean of the group, 0.5. The second call of the first rollout made it: 0.25 → 1.
    branches = (
        *branch_of(won, 1, 0.0, 0.0, 1.0, 0.0),
        *branch_of(won, 2, 1.0, 1.0, None, None),
        *branch_of(lost, 1, 0.5, 0.5),
        *branch_of(lost, 2, None, None),
    )
    made = replace(group_of(won, lost), branches=branches)
    # All branches from the last call of the second rollout are void: it shares with the call before what was lost, 0.5 → 0.
    assert vine(made, VineSettings()) == [{0: -0.25, 1: 0.75, 2: 0.0}, {0: 0.0, 1: -0.5, 2: -0.5}]
    scaled = vine(made, VineSettings(scaled=True))
    assert scaled[0][1] == pytest.approx(1.5, abs=1e-4)
    # With at least three continuations, only the first call of the first rollout has its own value.
    assert vine(made, VineSettings(least=3)) == [{0: -0.25, 1: 0.75, 2: 0.75}, {0: -0.5, 1: -0.5, 2: -0.5}]


def test_vine_sums_to_what_the_rollout_earned_above_the_mean():
    calls = tuple(step(index) for index in range(4))
    won, lost = graded(0, {"reward": 1.0}, steps=calls), graded(1, {"reward": 0.25}, steps=calls)
    made = replace(group_of(won, lost), branches=(*branch_of(won, 1, 0.2), *branch_of(won, 2, 0.9), *branch_of(won, 3, 0.4)))
    first, second = vine(made, VineSettings())
    assert sum(first.values()) == pytest.approx(1.0 - 0.625)
    assert set(second.values()) == {0.25 - 0.625}  # without a branch, all calls share
