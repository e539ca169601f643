"""`penstock train --control` and `penstock compare`: a run, the same with a learning rate of 0, and the two of them paired."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import called
from safetensors.torch import load_file
from torch import Tensor

from penstock.models import find_cached
from penstock.testing import write_project

pytestmark = pytest.mark.slow

CONFIG = """
run.name = "short"
model.name = "tiny"
dataset = {train = "tasks.jsonl", eval = "tasks.jsonl"}
rollout = {group_size = 2, groups_per_step = 2}
train = {steps = 2, lr = 1e-2, checkpoint_every = 1, attack_grader = false}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run and its control."""
    folder = write_project(tmp_path_factory.mktemp("compare"), config=CONFIG)
    assert called(folder, "train", "train.toml").returncode == 0
    control = called(folder, "train", "train.toml", "--control")
    assert control.returncode == 0, control.stderr
    assert "penstock compare runs/short-control runs/short" in control.stderr
    return folder


def weights(folder: Path, run: str) -> list[dict[str, Tensor]]:
    return [load_file(found / "model.safetensors") for found in sorted((folder / "runs" / run / "checkpoints").iterdir())]


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.JSONDecoder().raw_decode(line[line.index("{") :])[0] for line in lines]


def test_the_control_draws_the_same_tasks_and_its_weights_stay(project: Path):
    start = find_cached("tiny")
    assert start is not None
    begun = load_file(start.path / "model.safetensors")
    assert all(begun[name].equal(value) for saved in weights(project, "short-control") for name, value in saved.items())
    assert not all(begun[name].equal(value) for name, value in weights(project, "short")[-1].items())
    assert [e["group_ids"] for e in metrics(project, "short")] == [e["group_ids"] for e in metrics(project, "short-control")]


def test_runs_are_paired_by_task(project: Path):
    reported = called(project, "compare", "runs/short-control", "runs/short", "--json")
    found = json.loads(reported.stdout)
    assert (found["first"], found["second"], found["same_seed"]) == ("runs/short-control", "runs/short", True)
    assert (found["held_out"]["pairs"], found["training"]["pairs"]) == (4, 4)
    assert found["training"]["left_out"] == 0
    for side, run in (("first", "short-control"), ("second", "short")):
        rewards = [reward for entry in metrics(project, run) for reward in entry["rewards"]]
        assert found["training"][side] == pytest.approx(sum(rewards) / len(rewards))
    gain = found["training"]["difference"]
    assert gain["low"] <= gain["value"] <= gain["high"]
    text = called(project, "compare", "runs/short", "runs/short").stdout
    assert "no difference is established" in text


def test_folder_that_is_not_run_is_rejected_in_line(project: Path):
    reported = called(project, "compare", "runs/short", "runs/nothing")
    assert reported.returncode == 2
    assert "runs/nothing" in reported.stderr
    assert "Traceback" not in reported.stderr
