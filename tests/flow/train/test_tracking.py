"""Trackers next to a run: what they received, and that none can harm it. The real packages are in test_tracker_packages.py."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from async_cases import Watched

from penstock.errors import ConfigError
from penstock.run import tracking
from penstock.run.trackers.base import RolloutTrace, TrackedRun, Tracker, TrackerStart
from penstock.run.tracking import flat_numbers


class RecordingTracker(Tracker):
    reported: list[tuple[str, Any]] = []  # noqa: RUF012

    def start(self, run: TrackedRun) -> TrackerStart:
        self.reported.append(("start", run))
        return TrackerStart(run.id or "id-7", "in memory")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.reported.append(("log", (step, dict(metrics))))

    def traces(self, traces: Sequence[RolloutTrace], step: int) -> None:
        self.reported.append(("traces", (step, list(traces))))

    def artifact(self, path: Path, kind: str) -> None:
        self.reported.append(("artifact", (kind, path)))

    def finish(self, status: str) -> None:
        self.reported.append(("finish", status))


class NeverStarts(Tracker):
    def start(self, run: TrackedRun) -> TrackerStart:
        raise ConnectionError("no route")


class FailsAtLog(RecordingTracker):
    reported: list[tuple[str, Any]] = []  # noqa: RUF012

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ValueError("full")


class Hangs(RecordingTracker):
    reported: list[tuple[str, Any]] = []  # noqa: RUF012
    released = threading.Event()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.released.wait(60)


class NotInstalled(Tracker):
    modules = ("package_that_nobody_has",)
    extra = "nobody"


RECORDING = '"test_tracking:RecordingTracker"'


@pytest.fixture
def shown() -> list[tuple[str, Any]]:
    RecordingTracker.reported.clear()
    return RecordingTracker.reported


def of(shown: list[tuple[str, Any]], kind: str) -> list[Any]:
    return [what for name, what in shown if name == kind]


def notices(run: Watched) -> list[str]:
    return [fields["text"] for fields in run.events("notice")]


def test_run_is_reported_step_by_step_with_rollouts_and_files(tmp_path: Path, shown: list[tuple[str, Any]]) -> None:
    run = Watched(tmp_path, f"track.to=[{RECORDING}]", "track.checkpoint=true", 'track.project="p"')
    run.train()
    [start] = of(shown, "start")
    assert (start.project, start.name, start.id, start.first_step, start.offline) == ("p", "run", "", 1, False)
    assert start.config["train"]["steps"] == 3
    logged = of(shown, "log")
    assert [step for step, metrics in logged if "train/reward" in metrics] == [1, 2, 3]
    by_step = {step: metrics for step, metrics in logged if "train/reward" in metrics}
    for entry in run.metrics():
        assert by_step[entry["step"]]["train/reward"] == entry["reward"]
        assert by_step[entry["step"]]["train/ends/completed"] == entry["ends"]["completed"]
    assert [(step, metrics) for step, metrics in logged if "heldout/reward" in metrics] == [
        (0, {"heldout/reward": 1.0}),
        (3, {"heldout/reward": 1.0}),
    ]
    (step, traces), *_ = of(shown, "traces")
    assert (step, [trace.rollout_id for trace in traces]) == (1, ["train-0.0.1", "train-0.1.1"])
    assert traces[0].messages[-1]["content"] == "at 0"
    assert "[assistant]\nat 0" in traces[0].text() and traces[0].end == "completed"
    assert [kind for kind, _ in of(shown, "artifact")] == ["config", "summary", "model"]
    assert shown[-1] == ("finish", "finished")
    assert notices(run)[0] == "test_tracking:RecordingTracker: in memory"


def test_number_of_sent_rollouts_is_bounded(tmp_path: Path, shown: list[Any]) -> None:
    Watched(tmp_path, f"track.to=[{RECORDING}]", "track.rollouts=1").train()
    assert {len(traces) for _, traces in of(shown, "traces")} == {1}
    shown.clear()
    Watched(tmp_path, f"track.to=[{RECORDING}]", "track.rollouts=0", 'run.name="other"').train()
    assert of(shown, "traces") == []


def test_resumed_run_continues_under_same_id(tmp_path: Path, shown: list[Any]) -> None:
    first = Watched(tmp_path, f"track.to=[{RECORDING}]")
    first.stop_at = lambda kind, fields: kind == "train.step" and fields["step"] == 1
    first.train()
    assert shown[-1] == ("finish", "stopped")
    assert json.loads((tmp_path / "runs/run/trackers.json").read_text()) == {"test_tracking:RecordingTracker": "id-7"}
    shown.clear()
    Watched(tmp_path, f"track.to=[{RECORDING}]", 'track.project="another is no other run"').train()
    assert [(run.id, run.first_step) for run in of(shown, "start")] == [("id-7", 2)]
    assert shown[-1] == ("finish", "finished")


def test_failing_tracker_is_reported_once_and_others_continue(tmp_path: Path, shown: list[Any]) -> None:
    run = Watched(tmp_path, f'track.to=["test_tracking:NeverStarts", {RECORDING}]')
    assert run.train().status == "finished"
    failed = [text for text in notices(run) if "NeverStarts" in text]
    assert failed[0] == "test_tracking:NeverStarts failed, and the run continues: ConnectionError: no route"
    assert len(failed) == 2 and failed[1].startswith("test_tracking:NeverStarts lacks ")
    assert next(e for e in run.events("tracker.end") if "Never" in e["tracker"])["failed"] > 5
    assert shown[-1] == ("finish", "finished")


def test_a_tracker_that_fails_later_still_gets_the_rest(tmp_path: Path) -> None:
    run = Watched(tmp_path, 'track.to=["test_tracking:FailsAtLog"]')
    run.train()
    assert len([text for text in notices(run) if "ValueError: full" in text]) == 1
    assert len(of(FailsAtLog.reported, "traces")) == 3
    assert FailsAtLog.reported[-1] == ("finish", "finished")


def test_a_tracker_that_hangs_does_not_hold_up_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "FINISH_S", 0.1)
    run = Watched(tmp_path, 'track.to=["test_tracking:Hangs"]')
    try:
        assert run.train().status == "finished"
        assert any("took too long" in text for text in notices(run))
    finally:
        Hangs.released.set()


def test_calls_beyond_the_queue_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "FINISH_S", 0.1)
    monkeypatch.setattr(tracking, "MAX_QUEUED", 2)
    Hangs.released.clear()
    run = Watched(tmp_path, 'track.to=["test_tracking:Hangs"]')
    try:
        assert run.train().status == "finished"
        assert run.events("tracker.end")[0]["left_out"] > 2
    finally:
        Hangs.released.set()


def test_a_run_that_fails_is_a_failed_one_there_too(tmp_path: Path, shown: list[Any]) -> None:
    run = Watched(tmp_path, f"track.to=[{RECORDING}]")

    def fail(kind: str, fields: dict[str, Any]) -> bool:
        if kind == "train.step" and fields["step"] == 2:
            raise OSError("disk full")
        return False

    run.stop_at = fail
    with pytest.raises(OSError, match="disk"):
        run.train()
    assert shown[-1] == ("finish", "failed")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "test_tracking:NotInstalled",
            "package package_that_nobody_has is not installed; run: pip install '.[nobody]' in the checkout",
        ),
        ("wandbb", "unknown tracker 'wandbb'; did you mean 'wandb'?"),
        ("json:loads", "is no class that derives from penstock.run.trackers.base.Tracker"),
    ],
)
def test_tracker_that_cannot_be_used_is_rejected_before_run(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Watched(tmp_path, f'track.to=["{name}"]').train()
    assert says in str(refusal.value)
    assert not (tmp_path / "runs").exists()


def test_nested_numbers_get_names_with_slashes() -> None:
    fields = {"step": 3, "reward": 0.5, "kl": None, "ends": {"timeout": 2}, "bad": float("nan"), "group_ids": ["a"], "way": "disk"}
    assert flat_numbers(fields, "train") == {"train/reward": 0.5, "train/ends/timeout": 2.0}
