"""Preflight: everything that is wrong with a project at once, nothing written; and one rollout that leaves nothing behind."""

import json
import socket
import tempfile
from pathlib import Path

import pytest
from workspace_cases import made_workspace

from penstock.cli.app import run
from penstock.errors import ConfigError, DatasetError
from penstock.run.inputs import load_run_config
from penstock.run.preflight import check_project
from penstock.train.algorithm import check_algorithm

FLOW = """
from penstock_compat.flow import SingleStepSingleTurnAgentFlow, register

@register("once")
class Once(SingleStepSingleTurnAgentFlow):
    async def run(self, sampling_params, **kwargs):
        return 1
"""


@pytest.fixture
def workspace(tmp_path):
    return made_workspace(tmp_path / "ws")


def opened(workspace, *overrides, kind="eval"):
    file = {"eval": "configs/eval/multiply.toml", "train": "configs/training/multiply.toml"}[kind]
    return load_run_config(workspace / file, overrides, kind)


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check_project(config, "multiply.toml", check_algorithm)
    return caught.value


def test_valid_project_passes_unchanged(workspace):
    before = sorted(workspace.rglob("*"))
    check_project(opened(workspace), "multiply.toml", check_algorithm)
    assert [path for path in sorted(workspace.rglob("*")) if "__pycache__" not in path.parts] == before


def test_problems_of_every_part_are_reported_together(workspace):
    (workspace / "rollouts/multiply/main.py").write_text("import no_such_module_at_all\n")
    (workspace / "data/multiply.jsonl").write_text('{"user_prompt": "3*7"}\n{\n[]\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = [
            f"gateway.port={taken.getsockname()[1]}",
            "pool.name=zzz",
            "train.loss=zzz",
            "model.name=smollm9",
            "executor.x=1",
        ]
        found = refused(opened(workspace, *settings))
    keys = [issue.key for issue in found.issues]
    assert keys == ["pool.name", "train.loss", "gateway.port", "executor.x", "agent", "model.name", "line 2", "line 3"]
    assert str(found).splitlines()[0] == "multiply.toml: 8 problems"


def test_a_single_problem_keeps_its_own_kind_and_line(workspace):
    (workspace / "data/multiply.jsonl").write_text('{"user_prompt": "3*7"}\n{"label": "6"}\n')
    found = refused(opened(workspace))
    assert type(found) is DatasetError and "line 2: no prompt" in str(found)


def test_the_code_of_the_agent_is_not_loaded_here(workspace):
    (workspace / "rollouts/multiply/main.py").write_text("import os\nos._exit(3)\n")
    assert "its process ended with exit code 3" in str(refused(opened(workspace)))


def test_rows_of_flows_need_no_prompt(workspace):
    (workspace / "rollouts/multiply/main.py").write_text(FLOW)
    (workspace / "data/multiply.jsonl").write_text('{"question": "3*7"}\n')
    check_project(opened(workspace, "workflow={}"), "multiply.toml", check_algorithm)


def test_unreachable_servers_and_hubs_are_reported(workspace, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "hf:no/such" in str(refused(opened(workspace, "model.name=hf:no/such")))
    away = ["engine.name=vllm", 'engine.url=["http://127.0.0.1:1"]']
    assert "start vLLM there" in str(refused(opened(workspace, *away)))


@pytest.mark.slow
@pytest.mark.parametrize("command", [["eval", "run", "configs/eval/multiply.toml"], ["train", "configs/training/multiply.toml"]])
def test_dry_run_reports_one_rollout_and_leaves_nothing(workspace, monkeypatch, capsys, command):
    scratch = workspace.parent / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))  # read once for each process, so a variable would come too late
    monkeypatch.chdir(workspace)
    assert run([*command, "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["status"], answer["steps"] in (1, 2), answer["tokens"] > 0, answer["reward"] in (0.0, 1.0)) == (
        "completed",
        True,
        True,
        True,
    )
    assert not list(scratch.iterdir()) and not Path("runs").exists()
    assert run([*command, "--dry-run"]) == 0
    assert "rollout     completed" in (out := capsys.readouterr().out) and f"penstock {command[0]}" in out


@pytest.mark.slow
def test_dry_run_of_a_failing_agent_fails_with_reason(workspace, monkeypatch, capsys):
    code = (workspace / "rollouts/multiply/main.py").read_text()
    (workspace / "rollouts/multiply/main.py").write_text(code.replace("client = ctx.openai()", "raise RuntimeError('no luck')"))
    monkeypatch.chdir(workspace)
    assert run(["eval", "run", "configs/eval/multiply.toml", "--dry-run"]) == 1
    out = capsys.readouterr().out
    assert "agent_error" in out and "no luck" in out and "next" not in out


def test_bad_input_prints_one_line_per_problem(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    Path("configs/eval/multiply.toml").write_text('[experiment]\nrollout = "multiply"\nentry = "main.py"\n')
    assert run(["eval", "run", "configs/eval/multiply.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "penstock: configs/eval/multiply.toml: 3 problems"
    assert [line.strip().split(";")[0] for line in lines[1:]] == [
        "unknown key 'experiment.entry'",
        "key 'experiment.model_path' is missing",
        "key 'experiment.dataset' is missing",
    ]
    assert run(["train", "configs/eval/multiply.toml", "--json"]) == 2
    assert len(json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["issues"]) == 3
