"""Bad input to a command: one clear line, exit code 2, no traceback, nothing left behind."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.app import run

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


pytestmark = pytest.mark.project(agent=AGENT, config=CONFIG, tasks=[{"prompt": "2 times 3?", "label": "6"}])


def penstock(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("penstock")), *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | offline(folder), capture_output=True, text=True, timeout=120)


def offline(folder: Path) -> dict[str, str]:
    return {"PENSTOCK_CACHE": str(folder / "cache"), "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def refused(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call it with the arguments of a command: the one line that it says on stderr. `run` is all of the command but its exit."""
    monkeypatch.chdir(project)
    for name, value in offline(project).items():
        monkeypatch.setenv(name, value)

    def line(*arguments: str) -> str:
        code = run([*arguments])
        return reported(project, code, *capfd.readouterr())

    return line


def reported(folder: Path, code: int, out: str, err: str) -> str:
    """The one line of a refusal that left nothing behind."""
    assert (code, out) == (2, ""), err
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("penstock: ")
    assert not (folder / "runs").exists()
    return lines[0]


def test_the_command_itself_exits_as_it_is_refused(project):
    result = penstock(project, "train", "absent.toml")
    assert "absent.toml: no such file" in reported(project, result.returncode, result.stdout, result.stderr)


def test_bad_toml(project, refused):
    (project / "train.toml").write_text("[train\nsteps = 1")
    assert "not valid TOML" in refused("train", "train.toml")


def test_unknown_key_names_the_nearest(project, refused):
    (project / "train.toml").write_text(CONFIG + "[train]\nstep = 3\n")
    assert "unknown key 'train.step'; did you mean 'steps'?" in refused("train", "train.toml")


def test_wrong_type(refused):
    assert "train.steps = 'ten'" in refused("train", "train.toml", "--set", "train.steps=ten")


@pytest.mark.parametrize("override", ["train.steps", "=3", "nothing.at.all=1"])
def test_bad_override(override, refused):
    assert override.partition(".")[0] in refused("train", "train.toml", "--set", override)


def test_missing_dataset(project, refused):
    (project / "tasks.jsonl").unlink()
    assert "tasks.jsonl" in refused("train", "train.toml")


def test_empty_dataset(project, refused):
    (project / "tasks.jsonl").write_text("")
    assert "tasks.jsonl: has no rows" in refused("train", "train.toml")


def test_row_without_prompt_is_named_by_its_line(project, refused):
    (project / "tasks.jsonl").write_text('{"prompt": "1 times 1?"}\n{"label": "6"}\n')
    said = refused("train", "train.toml")
    assert "line 2" in said
    assert "no prompt" in said


def test_missing_agent(project, refused):
    (project / "agent.py").unlink()
    assert "agent.py: no such Python file" in refused("train", "train.toml")


def test_agent_that_cannot_be_imported(project, refused):
    (project / "agent.py").write_text("import no_such_module_at_all\n")
    said = refused("train", "train.toml")
    assert "agent.py, line 1" in said
    assert "no_such_module_at_all" in said


@pytest.mark.parametrize("name", ["smollm9-135m", "hf:", "./no/such/folder"])
def test_unknown_model(name, refused):
    assert name in refused("train", "train.toml", "--set", f"model.name={name}")


@pytest.mark.parametrize("key", ["engine.name", "pool.name", "rollout.executor", "train.advantage", "train.loss"])
def test_a_part_that_does_not_exist(key, refused):
    assert "unknown" in refused("train", "train.toml", "--set", f"{key}=zzz")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("train.advantage_settings={k=2}",), "'grpo' has no settings"),
        (("train.advantage='pass_at_k'", "train.advantage_settings={kk=2}"), "did you mean 'k'?"),
        (("train.loss='gspo'", "train.clip_low=0.1"), "train.clip_low is a setting of train.loss = 'clip'"),
        (("train.optimizer='muonn'",), "did you mean 'muon'?"),
        (("train.optimizer_settings={beta=2}",), "adamw has no setting 'beta'"),
    ],
)
def test_settings_of_algorithm_are_checked_before_model_is_fetched(overrides, says, refused):
    given = [word for override in overrides for word in ("--set", override)]
    assert says in refused("train", "train.toml", *given)


def test_taken_port(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused("train", "train.toml", "--set", f"gateway.port={port}")
    assert str(port) in said
    assert "set another" in said


def test_a_folder_that_is_no_run(refused):
    assert "not a run folder" in refused("report", ".")


def test_with_json_the_error_is_an_object_on_stderr(project):
    (project / "tasks.jsonl").write_text("")
    result = penstock(project, "train", "train.toml", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert json.loads(result.stderr)["error"]["code"] == "dataset_error"
