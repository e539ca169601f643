"""Where a workspace's things are, and files opened from anywhere inside it."""

import os

import pytest
from workspace_cases import EVAL, made_workspace

from penstock.errors import ConfigError, DatasetError
from penstock.run.inputs import load_run_config
from penstock_controller.workspace import Workspace, find_workspace, workspace_of


@pytest.fixture
def workspace(tmp_path):
    return made_workspace(tmp_path / "ws")


def edited(workspace, old, new):
    file = workspace / "configs/eval/multiply.toml"
    assert old in EVAL
    file.write_text(EVAL.replace(old, new))
    return file


def refusal(file, kind="eval"):
    with pytest.raises(ConfigError) as refused:
        load_run_config(file, (), kind)
    return refused.value


def test_workspace_is_found_from_below_if_complete(workspace):
    assert find_workspace(workspace / "rollouts/multiply") == Workspace(workspace)
    assert Workspace(workspace).rollouts() == ["multiply"]
    (workspace / "configs/training/multiply.toml").unlink()
    (workspace / "configs/training").rmdir()
    assert find_workspace(workspace / "rollouts") is None
    assert Workspace(workspace).missing() == ["configs/training"]
    with pytest.raises(ConfigError, match="doctor"):
        workspace_of(workspace)


def test_dataset_is_a_name_or_path_and_unambiguous(workspace):
    found = Workspace(workspace)
    (workspace / "data/other.csv").write_text("prompt\nhi\n")
    assert found.dataset("multiply") == found.dataset("data/multiply.jsonl") == found.dataset("multiply.jsonl")
    assert found.dataset(str(workspace / "data/other.csv")).name == "other.csv"
    with pytest.raises(DatasetError, match="multiply"):
        found.dataset("absent")
    (workspace / "data/multiply.csv").write_text("prompt\nhi\n")
    with pytest.raises(DatasetError, match="several"):
        found.dataset("multiply")


def test_experiment_is_opened_with_overrides(workspace, monkeypatch):
    monkeypatch.chdir(workspace / "rollouts")
    trained = load_run_config(workspace / "configs/training/multiply.toml", ["train.lr=0.5"], "train")
    assert (trained.train.steps, trained.train.lr, trained.run.name) == (16, 0.5, "multiply")  # 32 rows in steps of 2
    assert trained.run.folder == workspace / "runs"
    measured = load_run_config(workspace / "configs/eval/multiply.toml", ["eval.samples=2", "run.name=mine"], "eval")
    assert (measured.eval.rows, measured.eval.k, measured.run.name) == ("0-2", (1,), "mine")


def test_a_file_of_our_own_form_is_opened_as_ever(workspace):
    (workspace / "penstock.toml").write_text('[dataset]\ntrain = "data/multiply.jsonl"\n')
    assert load_run_config(workspace / "penstock.toml", ["train.steps=3"], "train").train.steps == 3


def test_endpoint_in_a_run_config_cannot_be_trained(workspace):
    (workspace / "penstock.toml").write_text('[dataset]\ntrain = "x.jsonl"\n[engine]\nname = "openai"\nurl = "http://h/v1"\n')
    assert "no weights to train" in str(refusal(workspace / "penstock.toml", "train"))


def test_environment_of_the_agent_is_set_or_required(workspace, monkeypatch):
    monkeypatch.setenv("WS_PLACE", "before")
    monkeypatch.delenv("WS_KEY", raising=False)
    file = edited(workspace, "[secrets]\nrequired = []", '[env]\nWS_PLACE = "here"\n[secrets]\nrequired = ["WS_KEY"]')
    assert "WS_KEY: the environment has none" in str(refusal(file))
    assert os.environ["WS_PLACE"] == "before"
    monkeypatch.setenv("WS_KEY", "x")
    load_run_config(file, (), "eval")
    assert os.environ["WS_PLACE"] == "here"


def test_missing_secrets_and_dataset_are_reported_together(workspace, monkeypatch):
    monkeypatch.delenv("WS_KEY", raising=False)
    file = edited(
        workspace,
        'dataset = "multiply"\n[evaluation]\nlimit = 3\n[secrets]\nrequired = []',
        'dataset = "gone"\n[secrets]\nrequired = ["WS_KEY"]',
    )
    assert [issue.key for issue in refusal(file).issues] == ["secrets.required", "experiment.dataset"]


def test_keys_without_effect_reach_the_listener(workspace):
    heard = []
    load_run_config(edited(workspace, "[secrets]", "[advanced]\ngpu = 8\n[secrets]"), (), "eval", warn=heard.append)
    assert len(heard) == 1 and "advanced.gpu is kept with the run" in heard[0]


def test_an_experiment_outside_of_a_workspace_says_what_one_is(tmp_path):
    (tmp_path / "x.toml").write_text(EVAL)
    assert "not inside a workspace" in str(refusal(tmp_path / "x.toml"))
