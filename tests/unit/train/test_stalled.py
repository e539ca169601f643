"""A run that learns nothing reports this, with the likely reason."""

from typing import Any

from penstock.records import End, Grade, Rollout, RolloutRef, Sampling, Step
from penstock.train.monitoring import idle_steps, reply_examples, why_idle


def entry(version: int, *rewards: float, equal: int = 2, **changes: Any) -> dict[str, Any]:
    return {"version": version, "rewards": list(rewards), "groups": 2, "groups_equal": equal, **changes}


def attempt(place: int, reward: float | None, reply: str | None) -> Rollout:
    rollout = RolloutRef(id=f"r{place}", group_id="g", task_id="t", place=place, attempt=1, channel="train")
    shared: dict[str, Any] = {"node": 0, "transcript": "main", "completion_ids": (1,), "logprobs": (-1.0,), "versions": (0,)}
    step = Step(
        rollout_id=rollout.id, index=0, sampling=Sampling(), finish="stop", message={"content": reply}, messages_digest="", **shared
    )
    grades = () if reward is None else (Grade(rollout_id=rollout.id, reward=reward, source="g"),)
    return Rollout(ref=rollout, end=End.COMPLETED, steps=(step,), grades=grades)


def test_the_last_steps_without_a_new_version_are_idle():
    metrics = [entry(1, 0, 1), entry(1, 0, 0), entry(1, 0, 0)]
    assert idle_steps(metrics) == metrics[1:]
    assert list(idle_steps([*metrics, entry(2, 0, 1)])) == []
    assert len(idle_steps([entry(0, 0, 0)] * 3)) == 3


def test_only_zeros_mean_that_there_was_no_first_success_and_show_the_reply():
    replies = {"commonest": {"count": 7, "of": 8, "text": "I cannot"}}
    why = why_idle([entry(0, 0.0, 0.0), entry(0, 0.0, 0.0, replies=replies)])
    assert why.startswith("no update in the last 2 steps: all rewards equal, every one is 0")
    assert "never a first success" in why
    assert "7 of 8 in the last step: 'I cannot'" in why
    assert "partial credit" in why


def test_only_ones_mean_that_it_is_solved():
    assert "the tasks are solved" in why_idle([entry(0, 1.0, 1.0)])


def test_always_and_never_solved_tasks_are_named():
    why = why_idle([entry(0, 0.0, 0.0, 1.0, 1.0)])
    assert "each task is always or never solved" in why
    assert "rollout.group_size" in why


def test_rewards_that_differ_without_update_point_at_what_was_masked():
    why = why_idle([entry(0, 0.0, 1.0, equal=1, masked={"greedy": 4})])
    assert "greedy 4" in why
    assert "all rewards equal" not in why


def test_rollouts_that_mostly_failed_are_named_with_their_reason():
    failed = {"failed": {"count": 6, "reason": "agent_error: workflow 'Multiply': no tool"}}
    why = why_idle([entry(0, 0.0, 0.0, equal=1, rollouts=8, shortfalls=failed)] * 2)
    assert "12 of 16 rollouts failed, and the rewards of the others are equal" in why
    assert "agent_error: workflow 'Multiply': no tool" in why
    assert "16 of 16 rollouts failed" in why_idle(
        [entry(0, equal=0, rollouts=16, shortfalls={"failed": {"count": 16, "reason": "x"}})]
    )


def test_the_replies_of_a_step_are_the_best_the_worst_and_the_most_common():
    found = reply_examples([attempt(0, 0.0, "no"), attempt(1, 1.0, "42"), attempt(2, 0.0, "no"), attempt(3, None, "lost")])
    assert found["replies"] == {
        "commonest": {"count": 2, "of": 3, "text": "no"},
        "best": {"reward": 1.0, "text": "42"},
        "worst": {"reward": 0.0, "text": "no"},
    }


def test_replies_without_text_or_of_equal_reward_have_no_best():
    assert reply_examples([attempt(0, 1.0, None)]) == {"replies": {}}
    assert set(reply_examples([attempt(0, 1.0, "a"), attempt(1, 1.0, "b")])["replies"]) == {"commonest"}


def test_zeros_after_a_success_are_not_misreported():
    why = why_idle([entry(1, 0.0, 1.0), entry(1, 0.0, 0.0)])
    assert why.startswith("no update in the last step: all rewards equal, every one is 0: no success to learn from any more")
