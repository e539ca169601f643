"""What a person reads at the end of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.train.trainer import Summary
from penstock.view.summary import (
    ResumeCommand,
    TrainingResult,
    as_lines,
    as_object,
    as_text,
    learned_nothing,
    longer_command,
    next_command,
)


def training_result(**changes: Any) -> TrainingResult:
    facts: dict[str, Any] = {"name": "demo", "folder": "runs/demo", "status": "finished", "steps": 10, "first_reward": 0.25}
    facts |= {"last_reward": 1.0, "eval_before": 0.5, "eval_after": 0.875, "exact_token_rate": 1.0, "rollouts": 320}
    facts |= {"sampled_tokens": 12345, "trained_tokens": 12000, "train_seconds": 192.4, "policy_version": 10}
    facts |= {"checkpoint": "runs/demo/checkpoints/10", "ends": {"completed": 318, "timeout": 2}}
    summary = Summary(**(facts | changes))
    reasons = {"timeout": {"the workflow ran longer than 120 s": 2}}
    return TrainingResult(
        summary=summary,
        rewards=[0.25, 1.0],
        reasons=reasons,
        report=Path("runs/demo/report.html"),
        resume=ResumeCommand("penstock train a.toml"),
    )


def test_the_last_words_name_results_places_and_the_next_command():
    text = as_text(training_result())
    for said in (
        "Run demo finished: 10 steps in 3:12.",
        "0.250 → 1.000",
        "0.500 → 0.875",
        "100 % of 12,345 sampled tokens",
        "320: 318 completed, 2 timeout",
        "timeout (2x): the workflow ran longer than 120 s",
        "runs/demo/report.html",
        "runs/demo/checkpoints/10",
        "penstock train a.toml --set train.steps=20",
    ):
        assert said in text


def test_what_is_not_exact_is_reported_by_reason():
    reported = {"inexact": {"context_differs": 12}, "masked": {"greedy": 2, "zero_advantage": 9}, "breaks": {"history_edited": 3}}
    text = as_text(training_result(exact_token_rate=0.99902, unhashed_tokens=1000, **reported))
    assert "99.9 % of 12,345 sampled tokens, 1,000 without a digest" in text
    for said in ("not exact   tokens: 12 context_differs", "masked      steps: 2 greedy", "breaks      3 history_edited"):
        assert said in text
    assert "zero_advantage" not in text
    assert json.loads(as_object(training_result(**reported)))["masked"] == reported["masked"]


def test_long_reason_is_wrapped_and_very_long_one_is_cut():
    reported = training_result()
    reported.reasons["agent_error"] = {"a reason " * 200: 1}
    lines = as_text(reported).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any(line.endswith("…") for line in lines)


def test_a_run_stopped_before_its_last_evaluation_shows_the_first():
    assert "0.500 before training" in as_text(training_result(status="stopped", eval_after=None))


def test_stopped_run_names_command_that_continues():
    text = as_text(training_result(status="stopped", steps=3))
    assert "stopped safely after step 3" in text
    assert text.rstrip().endswith("penstock train a.toml")


def test_finished_run_reports_how_to_start_over():
    text = as_text(training_result(already_finished=True))
    assert "finished earlier" in text
    assert "penstock train a.toml --fresh" in text


def test_a_run_without_evaluation_or_rollouts_still_sums_up():
    text = as_text(
        training_result(
            eval_before=None, eval_after=None, first_reward=None, last_reward=None, exact_token_rate=None, ends={}, rollouts=0
        )
    )
    assert "held-out" not in text
    assert "- → -" in text


def test_the_summary_as_json_is_one_object_with_all_fields():
    reported = json.loads(as_object(training_result()))
    assert reported["last_reward"] == 1.0
    assert reported["ends"] == {"completed": 318, "timeout": 2}
    assert reported["report"] == "runs/demo/report.html"
    assert reported["next"] == "penstock train a.toml --set train.steps=20"


def test_dropped_groups_are_reported_by_reason():
    assert "groups: 1 crashed the trainer" in as_text(training_result(dropped={"crashed the trainer": 1}))
    assert "dropped" not in as_text(training_result())


def test_run_without_an_update_explains_why():
    result = training_result(updates=0, stalled="no update in the last 10 steps: all rewards equal, every one is 0")
    text = as_text(result)
    assert "Run demo finished and learned nothing: 10 steps" in text
    assert "0 of 10 steps published a new version" in text
    assert "no update in the last 10 steps" in text
    assert next_command(result) == "penstock train a.toml --fresh"
    assert "train.steps=" not in text
    assert learned_nothing(result.summary)


def test_a_trial_of_few_steps_need_not_learn():
    assert not learned_nothing(training_result(updates=0, steps=2).summary)


def test_short_trial_without_update_has_no_checkpoint_to_evaluate():
    resume = ResumeCommand("penstock train a.toml", evaluate="penstock eval run a.toml")
    result = replace(training_result(updates=0, steps=2), resume=resume)
    assert next_command(result) == "penstock train a.toml --set train.steps=4"


def test_the_next_command_evaluates_the_checkpoint_and_repeats_no_setting():
    resume = ResumeCommand("penstock train a.toml --set train.steps=5 --set train.lr=1e-5", evaluate="penstock eval run a.toml")
    result = replace(training_result(updates=9), resume=resume)
    assert next_command(result) == "penstock eval run a.toml --model runs/demo/checkpoints/10"
    assert longer_command(result) == "penstock train a.toml --set train.lr=1e-5 --set train.steps=20"
    assert longer_command(result) in as_text(result)


def test_the_summary_says_what_the_two_rewards_are():
    assert "mean of the first 32 graded rollouts → of the last 64" in as_text(training_result())
    assert "mean of the first 20 graded rollouts → of the last 20" in as_text(training_result(graded=20))


def test_each_number_of_a_nested_table_is_a_plain_line():
    lines = as_lines(training_result(shortfalls={"wrong": {"count": 3, "reason": "reward 0, below 1"}})).splitlines()
    assert {"shortfalls.wrong.count\t3\t\t", "shortfalls.wrong.reason\treward 0, below 1\t\t"} <= set(lines)
