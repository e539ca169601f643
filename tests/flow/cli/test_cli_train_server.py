"""`penstock train` with its agents behind HTTP: a folder that `penstock rollout serve` serves trains as it does in-process."""

import contextlib
import json
import os
import subprocess

import pytest
from cli_cases import called, penstock

from penstock.testing import write_project

pytestmark = pytest.mark.slow

CONFIG = """
run.name = "short"
model.name = "tiny"
dataset.train = "tasks.jsonl"
rollout = {executor = "server", group_size = 2, groups_per_step = 2}
executor = {urls = ["%s"], token_env = "ROLLOUT_TOKEN"}
train = {steps = 2, attack_grader = false}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_TOKEN", "open sesame")
    return write_project(tmp_path, config=CONFIG % "http://127.0.0.1:9")


def trained(folder):
    return called(folder, "train", "train.toml", "--json")


@contextlib.contextmanager
def served(folder):
    """`penstock rollout serve` for the folder's agent, whose URL is put into the folder's config."""
    command = penstock("rollout", "serve", "agent.py", "--port", "0", "--token-env", "SERVED_TOKEN")
    environment = {**os.environ, "SERVED_TOKEN": "open sesame"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        ready = json.loads(process.stdout.readline())
        (folder / "train.toml").write_text(CONFIG % ready["url"])
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_run_on_rollout_server_trains_and_ends_like_any_other(project):
    with served(project):
        done = trained(project)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["steps"], summary["exact_token_rate"]) == ("finished", 2, 1.0)
    events = [json.loads(line) for line in (project / "runs/short/events.jsonl").read_text().splitlines()]
    assert [event["end"] for event in events if event["kind"] == "rollout.end"] == ["completed"] * 8


def test_wrong_token_is_reported_before_any_rollout(project, monkeypatch):
    monkeypatch.setenv("ROLLOUT_TOKEN", "guessed")
    with served(project):
        done = trained(project)
    assert done.returncode == 2
    assert "the rollout server's token is not valid" in done.stderr
    assert "executor.token_env" in done.stderr


def test_server_that_does_not_answer_is_named(project):
    done = trained(project)
    assert done.returncode == 2
    assert "executor.urls: no rollout server can be used: http://127.0.0.1:9/health" in done.stderr
