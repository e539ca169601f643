"""Each tracker against its real package, offline: what a run logged is read back with the package's own reader.

`make test-view` installs the packages and runs these; elsewhere, those whose package is missing are skipped.
"""

import importlib.util
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from async_cases import Watched

from penstock.run.trackers.base import TrackedRun
from penstock.run.trackers.tensorboard import TensorboardTracker

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the warnings are theirs


def train_twice(tmp_path: Path, tracker: str) -> Watched:
    """A run that was stopped after a step, and taken up."""
    overrides = (f'track.to=["{tracker}"]', 'track.mode="offline"', 'track.project="a project"', "track.checkpoint=true")
    first = Watched(tmp_path, *overrides)
    first.stop_at = lambda kind, fields: kind == "train.step" and fields["step"] == 1
    first.train()
    second = Watched(tmp_path, *overrides)
    second.train()
    for run in (first, second):
        assert [(end["tracker"], end["failed"], end["left_out"]) for end in run.events("tracker.end")] == [(tracker, 0, 0)]
    return second


def rewards(run: Watched) -> dict[int, float]:
    return {entry["step"]: entry["reward"] for entry in run.metrics()}


def needs(*modules: str) -> Callable[[Any], Any]:
    missing = [name for name in modules if not importlib.util.find_spec(name)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@needs("tensorboardX", "tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train_twice(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path / "runs/run/tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    assert {each.step: each.value for each in found.Scalars("train/reward")} == pytest.approx(rewards(run))
    assert [each.step for each in found.Scalars("train/reward")] == [1, 2, 3]
    text = found.Tensors("rollouts/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "- rollout: `train-0.0.1`" in text and "    at 0" in text


@needs("tensorboardX", "tensorboard")
def test_tensorboard_keeps_events_of_a_quick_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in range(1, 5):  # all in a second, or nearly
        tracker = TensorboardTracker()
        started = TrackedRun(project="", name="run", folder=tmp_path, config={}, first_step=step, id="known", offline=True)
        tracker.start(started)
        tracker.log({"reward": step / 4}, step)
        tracker.finish("stopped")
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in found.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: blocks of 32 KiB of chunks in LevelDB's form, after 7 bytes. 0.31 has no reader in Python."""
    place, parts = 7, list[bytes]()
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        parts.append(content[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts.clear()


@needs("wandb")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    run = train_twice(tmp_path, "wandb")
    wandb.teardown()  # its own process writes the files, some of it after `finish`
    logs = sorted((tmp_path / "runs/run/wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)
    history, configs, tables = dict[int, dict[str, Any]](), set[str](), list[Path]()
    for log in logs:
        for content in wandb_records(log.read_bytes()):
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                history.setdefault(row["step"], {}).update(row)
            if record.WhichOneof("record_type") == "run":
                configs.add(f"{record.run.project}/{record.run.run_id}/{record.run.display_name}")
        tables += log.parent.glob("files/media/table/*.table.json")
    assert {step: row["train/reward"] for step, row in history.items() if "train/reward" in row} == pytest.approx(rewards(run))
    [name] = configs  # the resumed one has the same id
    assert name.startswith("a project/") and name.endswith("/run")
    rows = [row for table in tables for row in json.loads(table.read_text())["data"]]
    assert {row[1] for row in rows} >= {"train-0.0.1", "train-0.1.1"}
    assert any("[assistant]\nat 0" in row[7] for row in rows)


@needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow(tmp_path: Path) -> None:
    import mlflow

    run = train_twice(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs/run/mlflow/mlflow.db'}")
    experiment = client.get_experiment_by_name("a project")
    [kept] = client.search_runs([experiment.experiment_id])
    assert (kept.info.run_name, kept.info.status, kept.data.params["train.steps"]) == ("run", "FINISHED", "3")
    history = client.get_metric_history(kept.info.run_id, "train/reward")
    assert {each.step: each.value for each in history} == pytest.approx(rewards(run))
    traces = client.search_traces(locations=[experiment.experiment_id], run_id=kept.info.run_id)
    assert {trace.info.tags["step"] for trace in traces} == {"1", "2", "3"}
    spans = {span.name: span for trace in traces for span in trace.data.spans}
    assert spans["train-0.0.1"].outputs["main"][-1]["content"] == "at 0"
    assert {item.path for item in client.list_artifacts(kept.info.run_id)} == {"config.json", "summary.json", "model"}


@needs("trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported first
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = train_twice(tmp_path, "trackio")
    records = SQLiteStorage.get_run_records("a project")
    [name] = {(record["name"], record["id"]) for record in records}
    logs = SQLiteStorage.get_logs("a project", name[0], run_id=name[1])
    assert {log["step"]: log["train/reward"] for log in logs if "train/reward" in log} == pytest.approx(rewards(run))
    traces = SQLiteStorage.get_traces("a project", name[0], run_id=name[1])
    assert any(trace["messages"][-1]["content"] == "at 0" and trace["metadata"]["end"] == "completed" for trace in traces)
    assert [each.name for each in trackio.Api().runs("a project")] == ["run"]
