"""A newcomer's first three commands, in a fresh folder, without an edit; and what the templates refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.app import run
from penstock.cli.scaffold import TEMPLATES
from penstock.config import load_config
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import open_agent

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PENSTOCK, *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_quickstart_then_eval_then_train_work_without_an_edit(tmp_path):
    written = ran(tmp_path, "quickstart", "--template", "tiny")
    assert written.returncode == 0 and "penstock eval run" in written.stdout, written.stderr
    measured = ran(tmp_path, "eval", "run", "--rows", "0-3")
    assert measured.returncode == 0 and "4 tasks x 1 of tiny" in measured.stdout, measured.stderr
    assert "next        penstock train" in measured.stdout
    trained = ran(tmp_path, "train", "--set", "train.steps=2", "--json")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["steps"] == 2


@pytest.mark.parametrize("name", list(TEMPLATES.table))
def test_every_template_is_whole(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert run(["template", "apply", name, "here"]) == 0
    assert "examples/" not in (tmp_path / "here" / "penstock.toml").read_text()
    config = load_config(tmp_path / "here" / "penstock.toml")
    agent = open_agent(config.agent, config.workflow, config.grader)
    assert agent.grader is not None
    assert all(load_tasks(file, columns=agent.kind.keeps_columns) for file in (config.dataset.train, config.dataset.eval))


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("mine")
    assert run(["quickstart"]) == 2
    assert "agent.py is there already and stays" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["agent.py"]
    assert run(["quickstart", "agent.py/sub"]) == 2
    assert run(["template", "apply", "none"]) == 2
    assert "there are plain, tiny" in capsys.readouterr().err


def test_templates_are_listed_and_reported_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["template", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in TEMPLATES)
    assert run(["quickstart", "new", "--template", "strands", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["next"][0] == "cd new" and reported["next"][-2:] == ["penstock eval run", "penstock train"]
    assert (tmp_path / "new" / "penstock.toml") in [tmp_path / path for path in reported["files"]]


def test_quickstart_writes_over_files_with_force_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("mine")
    assert run(["quickstart"]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "agent.py").read_text() == "mine"
    assert run(["quickstart", "--force"]) == 0
    assert (tmp_path / "agent.py").read_text() != "mine"
