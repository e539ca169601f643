"""Rules by data source, GSM8K's with numbers worked by hand, and the grader that applies them to a whole rollout."""

import asyncio

import pytest

from penstock import GraderContext
from penstock.errors import DatasetError, GraderError
from penstock.sdk.samples import RolloutSample
from penstock_compat.graders import gsm8k
from penstock_compat.graders.rule import RuleGrader, assistant_text, rule_reward

ROW = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "72"}}

STRICT = [
    ("48 + 24 = 72\n#### 72", "72", 1.0),
    ("#### 72", "72", 1.0),
    ("####72", "72", 1.0),
    ("#### 72.", "72", 1.0),
    ("#### 1,234,567", "1234567", 1.0),
    ("#### $1,080", "1080", 1.0),
    ("#### -$5", "-5", 1.0),
    ("#### 0.5", "0.5", 1.0),
    ("#### 71 no\n#### 72", "72", 1.0),
    ("#### 72 no\n#### 71", "72", 0.0),
    ("#### 72.0", "72", 0.0),
    ("#### 720", "72", 0.0),
    ("#### seventy-two", "72", 0.0),
    ("The answer is 72", "72", 0.0),
    ("#### \n72", "72", 0.0),
    ("### 72", "72", 0.0),
    ("", "72", 0.0),
]


@pytest.mark.parametrize(("text", "truth", "reward"), STRICT)
def test_strict_score_wants_the_mark_before_the_last_number(text, truth, reward):
    assert gsm8k.score(text, truth) == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [("It is 24, so 72 in all.", 1.0), ("72, then 24", 0.0), ("$72", 1.0), ("none", 0.0), ("#### 1 and 72", 1.0)],
)
def test_flexible_score_takes_the_last_number(text, reward):
    assert gsm8k.score(text, "72", flexible=True) == reward


def test_truth_is_number_at_end_of_worked_answer():
    assert gsm8k.ground_truth("48 #### 3\n48/2 = <<48/2=24>>24\n#### 1,072") == "1072"
    for broken in ("72", "#### ", "#### many", "####72"):
        with pytest.raises(DatasetError, match="end"):
            gsm8k.ground_truth(broken)


def test_reward_uses_the_rule_of_its_data_source():
    assert rule_reward("#### 72", ROW) == 1.0
    assert rule_reward("#### 72", {"data_source": "openai/gsm8k", "ground_truth": 72}) == 1.0
    assert rule_reward("#### 71", ROW) == 0.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "has no 'data_source'"),
        ({"data_source": 3, "ground_truth": "1"}, "has no 'data_source'"),
        ({"data_source": "openai/gsm8k"}, "has no ground truth"),
        ({"data_source": "openai/gsm8k", "reward_model": None}, "has no ground truth"),
        ({"data_source": "openai/gsm9k", "ground_truth": "1"}, "unknown data source 'openai/gsm9k'; known: openai/gsm8k"),
        ({"data_source": "os:getcwd", "ground_truth": "1"}, "unknown data source 'os:getcwd'"),
    ],
)
def test_row_without_a_rule_is_rejected_and_reported(fields, words):
    with pytest.raises(GraderError, match=words):
        rule_reward("#### 1", fields)


def graded(*messages, label="72"):
    ctx = GraderContext(label, {"main": RolloutSample(id="main", transcript=list(messages))}, metadata=ROW)
    asyncio.run(RuleGrader(None).grade(ctx))
    return ctx.reward


def test_rollout_is_scored_once_by_last_answer_that_policy_wrote():
    wrong, right = ({"role": "assistant", "content": f"#### {number}"} for number in (71, 72))
    asked = {"role": "user", "content": "Answer as #### 72"}
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert [graded(wrong, asked, right), graded(right, asked, wrong), graded(right, call), graded(asked)] == [1.0, 0.0, 1.0, 0.0]


def test_answer_that_a_request_brought_along_is_not_the_policys():
    given, said = {"role": "assistant", "content": "#### 72"}, {"role": "assistant", "content": "#### 71"}
    sample = RolloutSample(id="main", transcript=[said, given], replies=[said])
    ctx = GraderContext("72", {"main": sample}, metadata=ROW)
    asyncio.run(RuleGrader(None).grade(ctx))
    assert ctx.reward == 0.0


def test_label_counts_even_where_the_row_says_another_truth():
    assert graded({"role": "assistant", "content": "#### 5"}, label="5") == 1.0


def test_what_was_said_leaves_out_everyone_else_and_reads_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}, {"role": "assistant", "content": "c"}]
    assert assistant_text(talk) == "a\nb\nc"
