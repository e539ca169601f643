"""`train.on_alarm`: a run whose metrics go wrong warns, or warns and stops."""

from pathlib import Path
from typing import Any

import pytest
from async_cases import Watched

from penstock.train import loop
from penstock.train.monitoring import Alarm


def run_with_alarm(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str, **settings: Any) -> Watched:
    """A run of four steps that raises an alarm at its third."""

    def alarms(entries: list[dict[str, Any]], start_reward: float | None) -> list[Alarm]:
        number = entries[-1]["step"]
        return [Alarm("entropy_collapse", number, 1, f"step {number}: it fell", {}, "train-2")] if number == 3 else []

    monkeypatch.setattr(loop, "new_alarms", alarms)
    extra = [f"train.{name}={value}" for name, value in settings.items()]
    return Watched(folder, "train.steps=4", f'train.on_alarm="{how}"', "train.checkpoints_kept=9", *extra)


def test_warn_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_with_alarm(tmp_path, monkeypatch, "warn")
    summary = run.train()
    assert (summary.status, summary.steps, summary.stopped_by) == ("finished", 4, "")
    assert summary.alarms == ["entropy_collapse at step 3"]
    (event,) = run.events("train.alarm")
    assert (event["step"], event["group_id"], event["text"]) == (3, "train-2", "step 3: it fell")
    assert [entry["alarms"] for entry in run.metrics()] == [[], [], ["entropy_collapse"], []]


def test_stop_ends_after_the_step_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_with_alarm(tmp_path, monkeypatch, "stop")
    summary = run.train()
    assert (summary.status, summary.steps, summary.stopped_by) == ("stopped", 3, "entropy_collapse")
    assert "train.on_alarm" in run.events("notice")[-1]["text"]
    again = run.train()
    assert (again.status, again.steps, again.groups_undone) == ("finished", 4, 0)
