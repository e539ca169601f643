"""Workspaces and rollouts as they are written: all or nothing, nothing overwritten, fixed by the doctor."""

import json

import pytest

from penstock.cli.app import run
from penstock.cli.scaffold import find_template
from penstock.config import make_config
from penstock.errors import ConfigError
from penstock.run.inputs import load_run_config
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import open_agent
from penstock_controller.environments import requirements
from penstock_controller.workspace import (
    TEMPLATES,
    create_missing_folders,
    find_workspace,
    init_rollout,
    make_workspace,
    missing_folders,
)

WORKSPACES = list(TEMPLATES)


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_new_rollout_is_complete_and_consistent(tmp_path):
    workspace = make_workspace(tmp_path)
    written = init_rollout(workspace, "mine")
    assert [path.relative_to(workspace.path).as_posix() for path in written] == [
        *("rollouts/mine/main.py", "rollouts/mine/pyproject.toml", "rollouts/mine/README.md"),
        *("configs/eval/mine.toml", "configs/training/mine.toml", "data/mine.jsonl"),
    ]
    heard = []
    for kind, file in (("eval", "configs/eval/mine.toml"), ("train", "configs/training/mine.toml")):
        config = load_run_config(tmp_path / file, (), kind, warn=heard.append)
        assert open_agent(config.agent, config.workflow, config.grader).workflow_config is None
        assert load_tasks(config.dataset.train) and config.sampling.max_tokens == 40
    assert heard == [] and config.train.steps == 8


def test_rollout_overwrites_only_with_force_and_never_tasks(tmp_path):
    workspace = make_workspace(tmp_path)
    (tmp_path / "configs/eval/mine.toml").write_text("mine")
    (tmp_path / "data/mine.jsonl").write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match="mine"):
        init_rollout(workspace, "mine")
    assert everything(tmp_path) == before
    init_rollout(workspace, "mine", force=True)
    assert "[experiment]" in (tmp_path / "configs/eval/mine.toml").read_text()
    assert (tmp_path / "data/mine.jsonl").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "-x", "é"])
def test_a_name_that_no_folder_should_have_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="rollout"):
        init_rollout(make_workspace(tmp_path), name)


def test_what_cannot_be_written_whole_is_taken_back(tmp_path):
    workspace = make_workspace(tmp_path)
    (tmp_path / "configs/training/mine.toml").mkdir()
    with pytest.raises(ConfigError):
        init_rollout(workspace, "mine", force=True)
    assert not (tmp_path / "rollouts/mine").exists() and everything(tmp_path / "data") == [".gitkeep"]


def test_doctor_fixes_a_workspace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts").mkdir()
    run(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["workspace"]["state"] == "note" and "--fix" in checks["workspace"]["remedy"]
    run(["doctor", ".", "--fix", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["fixed"] == ["configs/eval", "configs/training", "data"] and missing_folders(tmp_path) == []
    assert create_missing_folders(tmp_path) == []
    run(["doctor", "rollouts", "--fix", "--json"])
    assert json.loads(capsys.readouterr().out)["fixed"] == [] and not (tmp_path / "rollouts/data").exists()


def test_the_doctor_names_what_is_wrong_with_each_experiment_file(tmp_path, capsys):
    init_rollout(make_workspace(tmp_path), "mine")
    (tmp_path / "configs/eval/bad.toml").write_text('[experiment]\nrollout = "mine"\n')
    run(["doctor", str(tmp_path), "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "rollouts: mine" in checks["workspace"]["found"] and "mine" not in checks
    assert checks["bad"]["state"] == "note" and "'experiment.dataset' is missing" in checks["bad"]["found"]


def test_the_doctor_leaves_other_folders_alone_and_refuses_none(tmp_path, capsys):
    run(["doctor", str(tmp_path), "--json"])
    assert "workspace" not in {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert everything(tmp_path) == []
    assert run(["doctor", str(tmp_path / "absent")]) == 2
    (tmp_path / "data").write_text("in the way")
    assert run(["doctor", str(tmp_path), "--fix"]) == 2
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("name", WORKSPACES)
def test_project_requires_published_packages(tmp_path, name):
    find_template(name).write(tmp_path)
    init_rollout(make_workspace(tmp_path), "mine")
    asked = {file.parent.name: requirements(file.parent) for file in tmp_path.glob("rollouts/*/pyproject.toml")}
    packages = {"multiply-local-strands": ["strands-agents", "openai"], "multiply-local-openai": ["openai-agents"]}
    assert asked == {name: packages[name], "mine": ["openai"]}
    assert "from a checkout" in (tmp_path / "rollouts/mine/pyproject.toml").read_text()


@pytest.mark.parametrize("name", WORKSPACES)
def test_a_workspace_template_is_whole(tmp_path, capsys, name):
    assert run(["template", "apply", name, str(tmp_path / "ws"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["next"][-2:] == [f"penstock eval run configs/eval/{name}.toml", f"penstock train configs/training/{name}.toml"]
    workspace = find_workspace(tmp_path / "ws")
    assert workspace is not None and workspace.rollouts() == [name]
    config = load_run_config(workspace.path / f"configs/training/{name}.toml", (), "train")
    agent = open_agent(config.agent, config.workflow, config.grader)
    assert agent.grader is not None and make_config(config.model_dump(mode="json"), "again") == config


def test_a_template_is_written_over_only_when_forced(tmp_path):
    find_template("command").write(tmp_path)
    with pytest.raises(ConfigError, match="already"):
        find_template("flow").write(tmp_path)
    find_template("flow").write(tmp_path, force=True)
    assert "flow.py" in (tmp_path / "penstock.toml").read_text()
