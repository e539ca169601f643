"""Bad input to the real command: one clear line, exit code 2, no traceback, nothing left behind."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

AGENT = """
from penstock import AgentWorkflow, Grader

class Echo(AgentWorkflow):
    async def run(self, ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

class One(Grader):
    async def grade(self, ctx):
        ctx.set_reward(1.0)
"""
CONFIG = """
[agent]
entry = "agent.py"
[dataset]
train = "tasks.jsonl"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder in which everything is right."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2 times 3?", "label": "6"}\n')
    (tmp_path / "train.toml").write_text(CONFIG)
    return tmp_path


def penstock(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("penstock")), *arguments]
    offline = {"PENSTOCK_CACHE": str(folder / "cache"), "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True, timeout=120)


def refused(folder: Path, *arguments: str) -> str:
    """The one line that the command says on stderr."""
    result = penstock(folder, *arguments)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("penstock: ")
    assert not (folder / "runs").exists()
    return lines[0]


def test_missing_file(project):
    assert "absent.toml: no such file" in refused(project, "train", "absent.toml")


def test_bad_toml(project):
    (project / "train.toml").write_text("[train\nsteps = 1")
    assert "not valid TOML" in refused(project, "train", "train.toml")


def test_unknown_key_names_the_nearest(project):
    (project / "train.toml").write_text(CONFIG + "[train]\nstep = 3\n")
    assert "unknown key 'train.step'; did you mean 'steps'?" in refused(project, "train", "train.toml")


def test_wrong_type(project):
    assert "train.steps = 'ten'" in refused(project, "train", "train.toml", "--set", "train.steps=ten")


@pytest.mark.parametrize("override", ["train.steps", "=3", "nothing.at.all=1"])
def test_bad_override(project, override):
    assert override.partition(".")[0] in refused(project, "train", "train.toml", "--set", override)


def test_missing_dataset(project):
    (project / "tasks.jsonl").unlink()
    assert "tasks.jsonl" in refused(project, "train", "train.toml")


def test_empty_dataset(project):
    (project / "tasks.jsonl").write_text("")
    assert "tasks.jsonl: has no rows" in refused(project, "train", "train.toml")


def test_row_without_prompt_is_named_by_its_line(project):
    (project / "tasks.jsonl").write_text('{"prompt": "1 times 1?"}\n{"label": "6"}\n')
    said = refused(project, "train", "train.toml")
    assert "line 2" in said
    assert "no prompt" in said


def test_missing_agent(project):
    (project / "agent.py").unlink()
    assert "agent.py: no such Python file" in refused(project, "train", "train.toml")


def test_agent_that_cannot_be_imported(project):
    (project / "agent.py").write_text("import no_such_module_at_all\n")
    said = refused(project, "train", "train.toml")
    assert "agent.py, line 1" in said
    assert "no_such_module_at_all" in said


@pytest.mark.parametrize("name", ["smollm9-135m", "hf:", "./no/such/folder"])
def test_unknown_model(project, name):
    assert name in refused(project, "train", "train.toml", "--set", f"model.name={name}")


@pytest.mark.parametrize("key", ["engine.name", "pool.name", "rollout.executor", "train.advantage", "train.loss"])
def test_a_part_that_does_not_exist(project, key):
    assert "unknown" in refused(project, "train", "train.toml", "--set", f"{key}=zzz")


def test_taken_port(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(project, "train", "train.toml", "--set", f"gateway.port={port}")
    assert str(port) in said
    assert "set another" in said


def test_a_folder_that_is_no_run(project):
    assert "not a run folder" in refused(project, "report", ".")


def test_with_json_the_error_is_an_object_on_stdout(project):
    (project / "tasks.jsonl").write_text("")
    result = penstock(project, "train", "train.toml", "--json")
    assert (result.returncode, result.stderr) == (2, "")
    assert json.loads(result.stdout)["error"]["code"] == "dataset_error"
