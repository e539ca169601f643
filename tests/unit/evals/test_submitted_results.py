"""A broken agent does not look like a bad model: passed, wrong, failed and ungraded are numbers of their own."""

from osmosis_ai.cli.evals import results_of
from osmosis_ai.cli.records import eval_summary
from penstock.config import EvalSection
from penstock_controller.api.results import AttemptSummary, EvaluationProgress, eval_results
from penstock_controller.cli.runs import as_text


def results(*ends: tuple[str, float, str]) -> dict:
    attempts = {
        (row, 0): AttemptSummary(f"r{row}", row, 0, end, reward, message, 1, 10, 5, 0.1)
        for row, (end, reward, message) in enumerate(ends)
    }
    progress = EvaluationProgress(rows=set(range(len(ends))), attempts=attempts)
    return eval_results(progress, EvalSection(), dataset_rows=len(ends), resumed=None)


def reported(found: dict) -> str:
    run = {"name": "asked", "status": "finished"}
    return " ".join(as_text("eval", {"eval_run": run, "results": found}).split())


def test_failed_rollouts_are_not_graded_again():
    found = results(("agent_error", 0.0, "ValueError: broken"), ("agent_error", 0.0, "ValueError: broken"))
    assert (found["graded"], found["passed"], found["failed"], found["skipped"], found["pass_rate"]) == (0, 0, 0, 2, None)
    assert "passed 0 of 0 graded" in reported(found)
    assert "failed 2 (agent_error: ValueError: broken) ungraded 0 wrong 0" in reported(found)


def test_wrong_failed_and_ungraded_are_three_numbers():
    found = results(
        ("completed", 1.0, ""),
        ("completed", 0.0, ""),
        ("completed", 0.0, ""),
        ("timeout", 0.0, "too slow"),
        ("grader_error", 0.0, "no reward"),
    )
    assert (found["graded"], found["passed"], found["failed"], found["skipped"]) == (3, 1, 2, 2)
    assert found["score"] == 0.2
    text = reported(found)
    for said in ("passed 1 of 3 graded", "wrong 2 (reward 0, below 1)", "failed 1 (timeout: too slow)", "ungraded 1 (no reward)"):
        assert said in text


def test_osmosis_command_reports_them_too():
    found = results(("agent_error", 0.0, "boom"), ("agent_error", 0.0, "boom"), ("completed", 0.0, ""))
    lines = results_of(eval_summary({"results": found}), found)
    assert lines[:3] == [
        "Results: graded 1, passed 0, failed 2, ungraded 0, wrong 1",
        "Failed: agent_error: boom",
        "Wrong: reward 0, below 1",
    ]
