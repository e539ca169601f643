"""Trackers of an evaluation: its numbers with their intervals, and its rollouts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from judge_double import judge_double
from test_eval_cost import AGENT, endpoint

from penstock.cli.app import run
from penstock.run.trackers.base import RolloutTrace, TrackedRun, Tracker, TrackerStart

REPORTED: list[tuple[str, Any]] = []


class EvalTracker(Tracker):
    def start(self, run: TrackedRun) -> TrackerStart:
        REPORTED.append(("start", run.name))
        return TrackerStart("an id", "in memory")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        REPORTED.append(("log", dict(metrics)))

    def traces(self, traces: Sequence[RolloutTrace], step: int) -> None:
        REPORTED.append(("traces", [trace.messages[-1]["content"] for trace in traces]))

    def finish(self, status: str) -> None:
        REPORTED.append(("finish", status))


def test_evaluation_reports_its_numbers_and_its_rollouts(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "6 times 7?"}\n{"prompt": "2 times 2?"}\n')
    with judge_double(endpoint) as double:
        flags = ["--agent", "agent.py", "--dataset", "tasks.jsonl", "--model", "m", "--name", "told"]
        flags += ["--base-url", double.url, "--set", "track.to=['test_eval_tracking:EvalTracker']"]
        assert run(["eval", "run", *flags, "--json"]) == 0, capsys.readouterr()
        reported = dict(REPORTED)
        REPORTED.clear()
        assert run(["eval", "run", *flags, "--json"]) == 0
        assert REPORTED == []  # nothing was left to do, so there was nothing to tell
    assert (reported["start"], reported["finish"]) == ("told", "finished")
    numbers = reported["log"]
    assert (numbers["eval/reward/value"], numbers["eval/passes/1/value"], numbers["eval/ends/completed"]) == (1.0, 1.0, 2.0)
    assert numbers["eval/prompt_tokens"] == 2000
    assert reported["traces"] == ["It is 42.", "It is 42."]
