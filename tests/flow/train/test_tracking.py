"""Trackers beside a run: what they are told, and that none can harm it. The real packages are in test_tracker_packages.py."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from async_cases import Watched

from penstock.errors import ConfigError
from penstock.run import tracking
from penstock.run.tracking import flat_numbers
from penstock.trackers.base import RolloutTrace, TrackedRun, Tracker, TrackerStart


class RecordingTracker(Tracker):
    told: list[tuple[str, Any]] = []  # noqa: RUF012

    def start(self, run: TrackedRun) -> TrackerStart:
        self.told.append(("start", run))
        return TrackerStart(run.id or "id-7", "in memory")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.told.append(("log", (step, dict(metrics))))

    def traces(self, traces: Sequence[RolloutTrace], step: int) -> None:
        self.told.append(("traces", (step, list(traces))))

    def artifact(self, path: Path, kind: str) -> None:
        self.told.append(("artifact", (kind, path)))

    def finish(self, status: str) -> None:
        self.told.append(("finish", status))


class NeverStarts(Tracker):
    def start(self, run: TrackedRun) -> TrackerStart:
        raise ConnectionError("no route")


class FailsAtLog(RecordingTracker):
    told: list[tuple[str, Any]] = []  # noqa: RUF012

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ValueError("full")


class Hangs(RecordingTracker):
    told: list[tuple[str, Any]] = []  # noqa: RUF012
    released = threading.Event()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.released.wait(60)


class NotInstalled(Tracker):
    modules = ("package_that_nobody_has",)
    extra = "nobody"


RECORDING = '"test_tracking:RecordingTracker"'


@pytest.fixture
def told() -> list[tuple[str, Any]]:
    RecordingTracker.told.clear()
    return RecordingTracker.told


def of(told: list[tuple[str, Any]], kind: str) -> list[Any]:
    return [what for name, what in told if name == kind]


def notices(run: Watched) -> list[str]:
    return [fields["text"] for fields in run.events("notice")]


def test_a_run_is_told_step_by_step_with_its_rollouts_and_files(tmp_path: Path, told: list[tuple[str, Any]]) -> None:
    run = Watched(tmp_path, f"track.to=[{RECORDING}]", "track.checkpoint=true", 'track.project="p"')
    run.train()
    [start] = of(told, "start")
    assert (start.project, start.name, start.id, start.first_step, start.offline) == ("p", "run", "", 1, False)
    assert start.config["train"]["steps"] == 3
    logged = of(told, "log")
    assert [step for step, metrics in logged if "train/reward" in metrics] == [1, 2, 3]
    by_step = {step: metrics for step, metrics in logged if "train/reward" in metrics}
    for entry in run.metrics():
        assert by_step[entry["step"]]["train/reward"] == entry["reward"]
        assert by_step[entry["step"]]["train/ends/completed"] == entry["ends"]["completed"]
    assert [(step, metrics) for step, metrics in logged if "heldout/reward" in metrics] == [
        (0, {"heldout/reward": 1.0}),
        (3, {"heldout/reward": 1.0}),
    ]
    (step, traces), *_ = of(told, "traces")
    assert (step, [trace.rollout_id for trace in traces]) == (1, ["train-0.0.1", "train-0.1.1"])
    assert traces[0].messages[-1]["content"] == "at 0"
    assert "[assistant]\nat 0" in traces[0].text() and traces[0].end == "completed"
    assert [kind for kind, _ in of(told, "artifact")] == ["config", "summary", "model"]
    assert told[-1] == ("finish", "finished")
    assert notices(run)[0] == "test_tracking:RecordingTracker: in memory"


def test_the_number_of_rollouts_is_bounded_and_none_are_sent_where_none_are_wanted(tmp_path: Path, told: list[Any]) -> None:
    Watched(tmp_path, f"track.to=[{RECORDING}]", "track.rollouts=1").train()
    assert {len(traces) for _, traces in of(told, "traces")} == {1}
    told.clear()
    Watched(tmp_path, f"track.to=[{RECORDING}]", "track.rollouts=0", 'run.name="other"').train()
    assert of(told, "traces") == []


def test_a_resumed_run_goes_on_under_the_same_id(tmp_path: Path, told: list[Any]) -> None:
    first = Watched(tmp_path, f"track.to=[{RECORDING}]")
    first.stop_at = lambda kind, fields: kind == "train.step" and fields["step"] == 1
    first.train()
    assert told[-1] == ("finish", "stopped")
    assert json.loads((tmp_path / "runs/run/trackers.json").read_text()) == {"test_tracking:RecordingTracker": "id-7"}
    told.clear()
    Watched(tmp_path, f"track.to=[{RECORDING}]", 'track.project="another is no other run"').train()
    assert [(run.id, run.first_step) for run in of(told, "start")] == [("id-7", 2)]
    assert told[-1] == ("finish", "finished")


def test_a_tracker_that_cannot_start_is_shown_once_and_counted_and_the_others_go_on(tmp_path: Path, told: list[Any]) -> None:
    run = Watched(tmp_path, f'track.to=["test_tracking:NeverStarts", {RECORDING}]')
    assert run.train().status == "finished"
    failed = [text for text in notices(run) if "NeverStarts" in text]
    assert failed[0] == "test_tracking:NeverStarts failed, and the run goes on: ConnectionError: no route"
    assert len(failed) == 2 and failed[1].startswith("test_tracking:NeverStarts lacks ")
    assert next(e for e in run.events("tracker.end") if "Never" in e["tracker"])["failed"] > 5
    assert told[-1] == ("finish", "finished")


def test_a_tracker_that_fails_later_still_gets_the_rest(tmp_path: Path) -> None:
    run = Watched(tmp_path, 'track.to=["test_tracking:FailsAtLog"]')
    run.train()
    assert len([text for text in notices(run) if "ValueError: full" in text]) == 1
    assert len(of(FailsAtLog.told, "traces")) == 3
    assert FailsAtLog.told[-1] == ("finish", "finished")


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


def test_a_run_that_fails_is_a_failed_one_there_too(tmp_path: Path, told: list[Any]) -> None:
    run = Watched(tmp_path, f"track.to=[{RECORDING}]")

    def fail(kind: str, fields: dict[str, Any]) -> bool:
        if kind == "train.step" and fields["step"] == 2:
            raise OSError("disk full")
        return False

    run.stop_at = fail
    with pytest.raises(OSError, match="disk full"):
        run.train()
    assert told[-1] == ("finish", "failed")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "test_tracking:NotInstalled",
            "package package_that_nobody_has is not installed; run: pip install '.[nobody]' in the checkout",
        ),
        ("wandbb", "unknown tracker 'wandbb'; did you mean 'wandb'?"),
        ("json:loads", "is no class that derives from penstock.trackers.base.Tracker"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Watched(tmp_path, f'track.to=["{name}"]').train()
    assert says in str(refusal.value)
    assert not (tmp_path / "runs").exists()


def test_numbers_of_inner_tables_have_names_with_slashes_and_the_rest_is_left_out() -> None:
    fields = {"step": 3, "reward": 0.5, "kl": None, "ends": {"timeout": 2}, "bad": float("nan"), "group_ids": ["a"], "way": "disk"}
    assert flat_numbers(fields, "train") == {"train/reward": 0.5, "train/ends/timeout": 2.0}
