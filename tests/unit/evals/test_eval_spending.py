"""Tokens, money and time of rollouts, against numbers worked by hand."""

import pytest

from penstock.config import EvalSection
from penstock.evals.outcome import ScoredRollout, TaskScores, outcome
from penstock.evals.spending import Prices, prices_of, rollout_seconds, rollout_usage, spending
from penstock.records import End, Rollout, Usage, make_rollout
from penstock.testing import make_node, make_step

PRICES = Prices(prompt=2.0, completion=10.0)


def node(number, parent, size):
    return make_node("g.0.1", number, (1,) * size, parent=parent, messages_digest=str(number))


def step(index, on, size, *, choice=0, usage=None, seconds=1.0):
    ids = () if usage else (2,) * size
    return make_step("g.0.1", index, ids, node=on, logprobs=(0.0,) * len(ids), choice=choice, usage=usage, seconds=seconds)


def attempt(nodes, steps):
    return Rollout(ref=make_rollout("g", "t", 0), end=End.COMPLETED, nodes=tuple(nodes), steps=tuple(steps))


def test_conversation_that_continues_is_read_again_with_each_call():
    talk = attempt([node(0, None, 10), node(1, 0, 3)], [step(0, 0, 5), step(1, 1, 2)])
    found = spending([rollout_usage(talk)], prices=PRICES)
    assert (found.steps, found.prompt_tokens, found.completion_tokens) == (2, 10 + (10 + 5 + 3), 7)
    assert found.cost == pytest.approx((28 * 2.0 + 7 * 10.0) / 1e6)


def test_further_choices_of_one_answer_read_nothing_again():
    found = spending([rollout_usage(attempt([node(0, None, 10)], [step(0, 0, 5), step(1, 0, 4, choice=1)]))])
    assert (found.prompt_tokens, found.completion_tokens, found.cost) == (10, 9, None)


def test_endpoint_usage_wins_over_our_count():
    reported = attempt([node(0, None, 0)], [step(0, 0, 0, usage=Usage(prompt_tokens=1000, completion_tokens=100))])
    found = spending([rollout_usage(reported)], prices=PRICES)
    assert (found.prompt_tokens, found.completion_tokens, found.cost) == (1000, 100, pytest.approx(0.003))
    silent = attempt([node(0, None, 0)], [step(0, 0, 0, usage=Usage(prompt_tokens=0, completion_tokens=0))])
    assert spending([rollout_usage(reported), rollout_usage(silent)], prices=PRICES).cost is None


def test_half_a_price_is_none():
    assert prices_of({"engine": {"price_in": 0.5, "price_out": 0}}) == (0.5, 0.0)
    assert prices_of({"engine": {"price_in": 0.5}}) is None
    assert prices_of({}) is None


def test_times_of_calls_and_rollouts_have_middle_and_tail():
    talk = attempt([node(0, None, 1)], [step(0, 0, 1, seconds=1.0), step(1, 0, 1, seconds=3.0)])
    found = spending([rollout_usage(talk)], seconds={"g.0.1": 7.0, "another": 100.0})
    assert (found.call_s, found.rollout_s) == (pytest.approx((2.0, 2.9)), (7.0, 7.0))
    assert (spending([]).call_s, spending([rollout_usage(talk)]).rollout_s) == (None, None)


def test_times_come_from_event_log_whatever_kill_left_of_it(tmp_path):
    assert rollout_seconds(tmp_path / "events.jsonl") == {}
    (tmp_path / "events.jsonl").write_bytes(
        b'{"kind":"rollout.start","rollout_id":"a"}\n'
        b'{"kind":"rollout.end","rollout_id":"a","seconds":1.5}\n'
        b'{"kind":"note","text":"\\"rollout.end\\""}\n'
        b'{"kind":"rollout.end","rollout_id":"b","sec'
    )
    assert rollout_seconds(tmp_path / "events.jsonl") == {"a": 1.5}


def test_outcome_reports_what_was_spent_next_to_its_rewards():
    talk = attempt([node(0, None, 10)], [step(0, 0, 5)])
    scored = TaskScores(task_id="t", row=0, rollouts=(ScoredRollout(End.COMPLETED, "", 0.0, rollout_usage(talk)),))
    reported = outcome([scored], EvalSection(), prices=PRICES, seconds={"g.0.1": 2.0}).as_json()
    assert (reported["prompt_tokens"], reported["completion_tokens"], reported["cost"]) == (10, 5, pytest.approx(7e-5))
    assert (reported["rollout_s"], reported["reward"]["value"]) == ({"p50": 2.0, "p95": 2.0}, 0.0)
