"""Alarms: each is raised by metrics that show it, once, and by no healthy run."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock.train.monitoring import SIGNS, WINDOW, Alarm, new_alarms
from penstock.view import demo

STEPS = 14


def step(number: int, reward: float, **changes: Any) -> dict[str, Any]:
    """One of a healthy run: 32 rollouts of 20 tokens, in 4 groups."""
    right = round(reward * 32)
    return {
        "step": number,
        "reward": reward,
        "rewards": [1.0] * right + [0.0] * (32 - right),
        "groups": 4,
        "groups_equal": 1,
        "groups_stale": 0,
        "group_ids": [f"train-{4 * number}"],
        "rollouts": 32,
        "ends": {"completed": 32},
        "sampled_tokens": 640,
        "trained_tokens": 600,
        "entropy": 0.5,
        "kl_behaviour": 1e-4,
        "logprob_gap": 0.1,
        "importance_high": 0.0,
        "replies": {"commonest": {"count": 4, "of": 32, "text": "42"}},
        **changes,
    }


def reported(curve: list[dict[str, Any]], start_reward: float | None = 0.2) -> list[Alarm]:
    """All alarms of a run, as its steps come."""
    return [alarm for end in range(1, len(curve) + 1) for alarm in new_alarms(curve[:end], start_reward)]


def rising(number: int) -> float:
    return min(1.0, 0.2 + 0.06 * number)


WRONG: dict[str, Any] = {
    "entropy_collapse": lambda n: step(n, 0.4, entropy=0.5 if n <= 5 else 0.01),
    "length_explosion": lambda n: step(n, 0.4, sampled_tokens=640 if n <= 5 else 640 * n),
    "equal_groups": lambda n: step(n, 0.0, groups_equal=4, trained_tokens=0),
    "held_out_flat": lambda n: step(n, rising(n), **({"eval_reward": 0.2} if n % 3 == 0 else {})),
    "one_pattern": lambda n: step(n, rising(n), replies={"commonest": {"count": 4 if n <= 5 else 30, "of": 32, "text": "yes"}}),
    "logprob_gap": lambda n: step(n, 0.4, kl_behaviour=0.2, logprob_gap=4.0),
    "importance_at_cap": lambda n: step(n, 0.4, importance_high=0.2),
    "lost_rollouts": lambda n: step(n, 0.4, ends={"completed": 10, "timeout": 22}),
}


@pytest.mark.parametrize("kind", SIGNS)
def test_alarm_is_raised_once_with_a_hint(kind: str):
    alarms = reported([WRONG[kind](number) for number in range(1, STEPS + 1)])
    assert [alarm.name for alarm in alarms] == [kind]
    (alarm,) = alarms
    assert alarm.step >= WINDOW
    assert alarm.since == max(0, alarm.step - WINDOW)
    assert alarm.group_id == f"train-{4 * alarm.step}"
    assert alarm.text.startswith(f"step {alarm.step}: ")
    assert alarm.values


@pytest.mark.parametrize(
    "curve",
    [
        lambda n: step(n, rising(n)),
        # solved: nothing is left to try, and all groups are equal
        lambda n: step(n, 1.0, entropy=0.5 / n**3, groups_equal=4, trained_tokens=0 if n > 6 else 600),
        # the reward rises while the policy makes up its mind
        lambda n: step(n, rising(n), entropy=0.5 / n**2),
        # longer replies that are worth it
        lambda n: step(n, rising(n), sampled_tokens=640 * n),
        # a task with two answers, from the start
        lambda n: step(n, rising(n), replies={"commonest": {"count": 20, "of": 32, "text": "yes"}}),
        lambda n: step(n, rising(n), eval_reward=rising(n) - 0.05),
        # rewards below zero
        lambda n: {**step(n, 0.0), "reward": -1 + 0.05 * n, "rewards": [-1 + 0.05 * n, -1.0]},
    ],
)
def test_a_healthy_run_raises_none(curve: Any):
    assert reported([curve(number) for number in range(1, STEPS + 1)]) == []


def test_a_recorded_run_that_learned_raises_none():
    with tarfile.open(Path(demo.__file__).with_name("demo.tar.xz")) as archive:
        file = archive.extractfile("multiply/metrics.jsonl")
        assert file is not None
        lines = file.read().decode().splitlines()
    curve = [json.JSONDecoder().raw_decode(line[line.index("{") :])[0] for line in lines]
    assert len(curve) > 2 * WINDOW
    assert curve[-1]["reward"] > 3 * curve[0]["reward"]
    assert reported(curve) == []


def test_alarm_that_passed_is_reported_again_when_it_comes_back():
    bad, good = WRONG["lost_rollouts"], step
    curve = [*(bad(n) for n in range(1, 6)), *(good(n, 0.4) for n in range(6, 12)), *(bad(n) for n in range(12, 20))]
    assert [alarm.name for alarm in reported(curve)] == ["lost_rollouts"] * 2


def test_metrics_of_an_earlier_penstock_lack_fields():
    bare = [{"step": n, "reward": 0.5, "rewards": [0.5], "groups_equal": 0, "groups": 1, "trained_tokens": 1} for n in range(1, 15)]
    assert reported(bare, None) == []
