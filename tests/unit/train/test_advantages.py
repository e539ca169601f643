import math

import pytest

from penstock.records import Attempt, End, Grade, Group, Task, make_rollout
from penstock.train.advantages import ADVANTAGES, DIVISORS
from penstock.train.advantages.dr_grpo import dr_grpo
from penstock.train.advantages.grpo import grpo


def group(*rewards: float | None) -> Group:
    """A reward of None is a rollout that failed before it was graded."""
    attempts: list[Attempt] = []
    for place, reward in enumerate(rewards):
        rollout = make_rollout("train-0", "t", place)
        grades = () if reward is None else (Grade(rollout_id=rollout.id, reward=reward, source="test"),)
        end = End.AGENT_ERROR if reward is None else End.COMPLETED
        attempts.append(Attempt(rollout=rollout, end=end, grades=grades))
    return Group(id="train-0", seq=0, task=Task(id="t", prompt=()), channel="train", attempts=tuple(attempts))


def test_grpo_divides_by_the_population_deviation():
    # mean 1/4; deviations -1/4 x3, 3/4: variance (3/16 + 9/16) / 4 = 3/16
    spread = math.sqrt(3) / 4
    assert grpo(group(0, 0, 0, 1)) == pytest.approx([-0.25 / spread] * 3 + [0.75 / spread], rel=1e-5)


def test_dr_grpo_only_takes_the_mean_away():
    assert dr_grpo(group(0, 0, 0, 1)) == [-0.25, -0.25, -0.25, 0.75]


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("rewards", [(), (1.0,), (0.1, 0.1, 0.1), (0.7,) * 7])
def test_equal_rewards_give_exact_zeros(name: str, rewards: tuple[float, ...]):
    assert ADVANTAGES.load(name)(group(*rewards)) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_ungraded_rollouts_have_no_advantage_and_no_part_in_the_mean(name: str):
    advantage = ADVANTAGES.load(name)
    assert advantage(group(None, 0.0, None, 1.0)) == advantage(group(0.0, 1.0))


def test_a_tiny_spread_stays_finite():
    assert all(abs(value) <= 1.0 for value in grpo(group(1.0, 1.0 + 1e-15)))


def test_divisors_belong_to_known_advantages():
    assert set(DIVISORS) <= set(ADVANTAGES)
