import orjson
import pytest

from penstock.run.folder import RunFolder
from penstock_controller.api.curves import TrainingReader

REWARD = "rollout/raw_reward"


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path, resumed=True)


def add(folder, step, reward, *, groups=2):
    folder.add_metrics({"step": step, "steps": 9, "reward": reward, "groups": groups})


def tell(folder, kind, time, **fields):
    with folder.events.open("ab") as events:
        events.write(orjson.dumps({"time": time, "kind": kind, **fields}, option=orjson.OPT_APPEND_NEWLINE))


def points(trained, key=REWARD):
    (found,) = (metric["data_points"] for metric in trained.metrics() if metric["metric_key"] == key)
    return [(point["step"], point["value"]) for point in found]


def test_steps_that_were_read_are_not_read_again(folder):
    trainings = TrainingReader()
    add(folder, 1, 0.1)
    add(folder, 2, 0.2)
    before = trainings.read(folder.path)
    file = folder.path / "metrics.jsonl"
    file.write_bytes(file.read_bytes().replace(b"0.1", b"0.9"))
    add(folder, 3, 0.3)
    after = trainings.read(folder.path)
    assert points(before) == [(1, 0.1), (2, 0.2)]
    assert points(after) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert (after.step, after.reward, after.examples) == (3, 0.3, 6)


def test_partial_line_is_read_later(folder):
    trainings = TrainingReader()
    add(folder, 1, 0.1)
    with (folder.path / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(b'{"step":2,"rew')
        assert trainings.read(folder.path).step == 1
        file.write(b'ard":0.2,"groups":2}\n')
    assert points(trainings.read(folder.path)) == [(1, 0.1), (2, 0.2)]


@pytest.mark.parametrize("redone", [0, 1, 4])
def test_steps_undone_by_a_kill_are_forgotten(folder, redone):
    trainings = TrainingReader()
    for step in range(1, 4):
        add(folder, step, 0.1)
    assert trainings.read(folder.path).examples == 6
    folder.keep_metrics(1)
    for step in range(2, 2 + redone):
        add(folder, step, 0.75, groups=3)
    trained = trainings.read(folder.path)
    assert points(trained) == [(1, 0.1), *((step, 0.75) for step in range(2, 2 + redone))]
    assert trained.examples == 2 + 3 * redone


def test_damaged_metrics_are_read_as_far_as_possible(folder):
    trainings, file = TrainingReader(), folder.path / "metrics.jsonl"
    assert trainings.read(folder.path).metrics() == []
    add(folder, 1, 0.1)
    add(folder, 2, 0.2)
    assert trainings.read(folder.path).step == 2
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 3)
    assert points(trainings.read(folder.path)) == [(1, 0.1)]
    file.unlink()
    assert (trainings.read(folder.path).step, trainings.read(folder.path).steps) == (0, None)


def test_step_time_is_that_of_its_last_event(folder):
    trainings = TrainingReader()
    add(folder, 1, 0.1)
    folder.add_evaluation("during-1", 0.5)
    written = round((folder.path / "metrics.jsonl").stat().st_mtime * 1000)
    times = [trainings.read(folder.path)]
    for time in (100.0, 200.0):
        tell(folder, "train.step", time, step=1)
        tell(folder, "eval.end", time + 1, when="during", step=1)
        times.append(trainings.read(folder.path))
    answer = [[metric["data_points"][0]["timestamp"] for metric in trained.metrics()] for trained in times]
    assert answer == [[written, written], [100_000, 101_000], [200_000, 201_000]]
