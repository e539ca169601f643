from dataclasses import replace

from test_advantages import graded, group_of, step
from test_sequences import group, two_turns

from penstock.records import Grade
from penstock.train.credit import less, overlong, token_rewards
from penstock.train.sequences import sequences


def test_overlong_takes_off_in_proportion():
    rollouts = [graded(at, {"reward": 1.0}, steps=(step(0, tokens=size),)) for at, size in enumerate((400, 450, 500, 900))]
    assert [each.reward for each in overlong(group_of(*rollouts), (400, 500)).rollouts] == [1.0, 0.5, 0.0, 0.0]


def test_a_penalty_comes_off_the_grade_that_counts():
    steps = (step(0, "planner"), step(1, "executor"))
    off = {0: 0.25, 1: 0.5}
    whole = less(graded(0, {"reward": 1.0}, {"reward": 9.0, "step": 0}, steps=steps), off)
    assert whole.reward == 0.25
    parts = less(graded(0, {"reward": 1.0, "transcript": "planner"}, {"reward": 3.0, "transcript": "executor"}, steps=steps), off)
    assert [grade.reward for grade in parts.grades] == [0.75, 2.5]
    single = less(graded(0, {"reward": 1.0, "step": 0}, steps=steps), off)
    assert single.reward == 0.25 and [(g.step, g.reward) for g in single.grades] == [(0, 1.0), (0, -0.25), (1, -0.5)]


def test_rewards_lie_at_the_last_token_of_their_step():
    made = two_turns()  # two replies, of two tokens and of one
    own = Grade(rollout_id=made.ref.id, reward=5.0, source="test", step=0)
    (only,) = sequences(group(made), [0.0], without_credit=True).sequences
    assert token_rewards(made, only) == [0.0, 0.0, 1.0]
    assert token_rewards(replace(made, grades=(*made.grades, own)), only) == [0.0, 5.0, 1.0]
