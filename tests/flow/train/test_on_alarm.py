"""`train.on_alarm`: a run whose metrics go wrong tells, stops, or goes back to a checkpoint from before."""

from pathlib import Path
from typing import Any

import pytest
from async_cases import Watched

from penstock.train import loop
from penstock.train.alarms import Alarm


def run_with_alarm(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str, *, since: int = 1, **settings: Any) -> Watched:
    """A run of four steps that raises an alarm at its third."""

    def alarms(entries: list[dict[str, Any]], start_reward: float | None) -> list[Alarm]:
        number = entries[-1]["step"]
        return [Alarm("entropy_collapse", number, since, f"step {number}: it fell", {}, "train-2")] if number == 3 else []

    monkeypatch.setattr(loop, "new_alarms", alarms)
    extra = [f"train.{name}={value}" for name, value in settings.items()]
    return Watched(folder, "train.steps=4", f'train.on_alarm="{how}"', "train.checkpoints_kept=9", *extra)


def test_warn_tells_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_with_alarm(tmp_path, monkeypatch, "warn")
    summary = run.train()
    assert (summary.status, summary.steps, summary.stopped_by) == ("finished", 4, "")
    assert summary.alarms == ["entropy_collapse at step 3"]
    (told,) = run.events("train.alarm")
    assert (told["step"], told["group_id"], told["text"]) == (3, "train-2", "step 3: it fell")
    assert [entry["alarms"] for entry in run.metrics()] == [[], [], ["entropy_collapse"], []]


def test_stop_ends_after_the_step_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_with_alarm(tmp_path, monkeypatch, "stop")
    summary = run.train()
    assert (summary.status, summary.steps, summary.stopped_by) == ("stopped", 3, "entropy_collapse")
    assert "train.on_alarm" in run.events("notice")[-1]["text"]
    again = run.train()
    assert (again.status, again.steps, again.groups_undone) == ("finished", 4, 0)


def test_rollback_sets_later_checkpoints_aside_and_their_groups_are_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_with_alarm(tmp_path, monkeypatch, "rollback")
    assert run.train().steps == 3
    folder = tmp_path / "runs/run/checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["000001", "000002.rolled-back", "000003.rolled-back"]
    assert "from step 1, version 1" in run.events("notice")[-1]["text"]
    monkeypatch.setattr(loop, "new_alarms", lambda entries, start_reward: [])
    again = run.train()
    assert (again.status, again.steps, again.groups_undone) == ("finished", 4, 2)
    trained = [group for entry in run.metrics() for group in entry["group_ids"]]
    assert len(trained) == len(set(trained)) == 4  # each group once
    assert [entry["version"] for entry in run.metrics()] == [1, 4, 5, 6]  # no number twice


def test_without_an_earlier_checkpoint_the_rollback_says_so_and_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_with_alarm(tmp_path, monkeypatch, "rollback", since=0)
    run.train()
    assert "checkpoints_kept" in run.events("notice")[-1]["text"]
    assert not list((tmp_path / "runs/run/checkpoints").glob("*.rolled-back"))
