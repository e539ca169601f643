"""`penstock eval|train submit, list, info, logs, stop, download` against a controller in a separate process."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from controller_process import DEADLINE_S, environment, penstock


@pytest.mark.slow
def test_evaluation_is_submitted_followed_and_downloaded(command, project):
    queued = command("eval", "submit", project / "penstock.toml", "--set", "eval.rows=0-3", "--name", "First try", "--json")
    assert queued.code == 0, queued
    name = queued.json["name"]
    assert (name, queued.json["status"]) == ("first-try", "pending")
    followed = command("eval", "logs", name, "-f")
    assert followed.code == 0 and "4 tasks x 1 of tiny" in followed.out, followed
    assert f"evaluation {name} is finished" in followed.err
    answer = command("eval", "info", name, "--json", "-o", "kept.json").json
    assert (answer["eval_run"]["status"], answer["results"]["total_runs"]) == ("finished", 4)
    assert json.loads(Path("kept.json").read_text()) == answer
    assert "penstock eval download first-try" in command("eval", "info", name).out
    fetched = command("eval", "download", name, "--type", "all", "--json").json
    assert (fetched["status"], fetched["downloaded"], fetched["skipped"]) == ("done", 7, 0)
    assert (Path("downloads/eval/first-try/trajectories/row_3_run_0.json")).is_file()
    again = command("eval", "download", name, "--type", "all", "--json").json
    assert (again["downloaded"], again["skipped"]) == (0, 7)
    assert command("eval", "download", name, "--rows", "1", "-o", "one", "--json").json["downloaded"] == 3
    page = command("eval", "logs", name, "--limit", "3", "--json").json
    assert len(page["logs"]) == 3
    assert command("eval", "logs", name, "--limit", "2", "--cursor", page["next_cursor"]).code == 0
    assert command("eval", "logs", name, "--plain").out.count("\t") >= 3


@pytest.mark.slow
def test_a_training_run_can_be_followed_and_its_model_downloaded(command, project):
    name = command("train", "submit", project / "penstock.toml", "--set", "train.steps=2", "-y", "--json").json["name"]
    lines = command("train", "logs", name, "--follow", "--json").out.splitlines()
    assert json.loads(lines[-1]) == {"name": name, "status": "finished", "message": ""}
    answer = command("train", "info", name, "--json").json
    assert answer["metrics"]["overview"]["latest_step"] == 2
    assert [each["checkpoint_step"] for each in answer["checkpoints"]] == [2]
    assert "Held-out reward" in command("train", "info", name).out
    fetched = command("train", "download", name, "--type", "checkpoints,report", "-o", "here", "--json")
    assert fetched.code == 0 and fetched.json["failed"] == []
    assert Path("here/report.html").is_file() and list(Path("here/checkpoints").glob("*/model.safetensors"))
    trained = command("model", "list", "--json").json["trained"]
    assert [each["model_name"] for each in trained] == [f"{name}/step-2"]
    assert command("model", "info", f"{name}/step-2", "--json").json["base_model"] == "tiny"


@pytest.mark.slow
def test_ctrl_c_ends_following_but_not_the_run(command, project, serving):
    queued = command("train", "submit", project / "penstock.toml", "--set", "train.steps=100000", "--name", "long", "--json")
    assert queued.code == 0, queued
    following = subprocess.Popen(
        penstock("train", "logs", "long", "-f"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(serving.home),
    )
    assert following.stdout is not None and "the run begins" in following.stdout.readline()
    following.send_signal(signal.SIGINT)
    assert "penstock train stop long" in following.communicate(timeout=DEADLINE_S)[1]
    assert following.returncode == 130
    assert command("train", "info", "long", "--json").json["training_run"]["status"] == "running"
    assert command("train", "stop", "long", "--json").json["stop_asked"] is True
    followed = command("train", "logs", "long", "-f")
    assert followed.code == 1 and "training run long is stopped" in followed.err
    assert command("train", "stop", "long", "--json").error == "RUN_OVER"
    row = next(row for row in command("train", "list", "--plain").out.splitlines() if row.startswith("long\t"))
    assert row.split("\t")[1] == "stopped"


def test_lists_have_three_formats_and_a_hint(command, project):
    assert command("eval", "list", "--json", "--plain").code == 2
    page = command("eval", "list", "--all", "--json").json
    assert page["total_count"] == len(page["eval_runs"])
    assert command("secret", "list", "--json").json["environment_secrets"] == []
    empty = command("secret", "list")
    assert (empty.code, empty.out) == (0, "") and "penstock secret set NAME" in empty.err
    assert command("secret", "list", "--plain")[:2] == (0, "")


@pytest.mark.parametrize("kind", ["eval", "train"])
@pytest.mark.parametrize("arguments", [["info"], ["logs"], ["logs", "-f"], ["stop"], ["download"]], ids=" ".join)
def test_unknown_run_has_a_code(command, kind, arguments):
    answer = command(kind, *arguments, "absent", "--json")
    assert (answer.code, answer.error) == (2, "RUN_NOT_FOUND")
    said = command(kind, *arguments, "absent")
    assert (said.code, said.out) == (2, "") and f"penstock {kind} list" in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["eval", "submit", "absent.toml"], "config_error"),
        (["eval", "submit"], "usage"),
        (["eval", "logs", "x", "-f", "--limit", "3"], "config_error"),
        (["eval", "logs", "x", "--plain"], "config_error"),
        (["eval", "download", "x", "--type", "weights"], "config_error"),
        (["eval", "download", "x", "--type", ","], "config_error"),
        (["train", "list", "--limit", "51"], "usage"),
        (["eval", "list", "--limit", "0"], "usage"),
        (["rollout", "list"], "config_error"),
        (["rollout", "list", "--branch", "main"], "config_error"),
        (["rollout", "init", "one"], "config_error"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_wrong_file_or_flag_is_refused_with_a_code(command, arguments, code):
    answer = command(*arguments, "--json")
    assert (answer.code, answer.error) == (2, code)


@pytest.mark.slow
def test_bad_submission_reports_all_problems_and_queues_nothing(command, project, serving):
    before = command("eval", "list", "--json").json["total_count"]
    shutil.copytree(project, "bad")
    Path("bad/tiny_tasks.jsonl").write_text('{"user_prompt": 7}\n{"user_prompt": "1*2"}\n\n{}\n')
    answer = command("eval", "submit", "bad/penstock.toml", "--set", "model.name=absent/model", "--json")
    assert (answer.code, answer.error) == (2, "CONFIG_INVALID"), answer
    keys = [issue["key"] for issue in answer.json["error"]["issues"]]
    assert keys == ["model.name", "line 1", "line 3", "line 4"]
    assert command("eval", "list", "--json").json["total_count"] == before


@pytest.mark.parametrize(
    ("text", "code"),
    [("[dataset]\ntrian = 1\n", "config_error"), ("[dataset\n", "config_error"), ('[experiment]\nrollout = "x"\n', "config_error")],
)
def test_bad_file_is_refused_before_connecting(command, monkeypatch, text, code):
    monkeypatch.setenv("PENSTOCK_CONTROLLER", "http://127.0.0.1:1")
    monkeypatch.setenv("PENSTOCK_CONTROLLER_TOKEN", "x")
    Path("a.toml").write_text(text)
    answer = command("eval", "submit", "a.toml", "--json")
    assert (answer.code, answer.error) == (2, code)


def test_absent_controller_and_wrong_token_have_codes(command, monkeypatch, serving, project):
    monkeypatch.setenv("PENSTOCK_CONTROLLER", "http://127.0.0.1:1")
    assert command("eval", "list", "--json").error == "config_error"  # no token
    monkeypatch.setenv("PENSTOCK_CONTROLLER_TOKEN", "wrong")
    for arguments in (["eval", "list"], ["dataset", "list"], ["secret", "list"], ["eval", "submit", project / "penstock.toml"]):
        answer = command(*arguments, "--json")
        assert (answer.code, answer.error) == (1, "CONTROLLER_UNREACHABLE")
    monkeypatch.setenv("PENSTOCK_CONTROLLER", serving.ready["url"])
    answer = command("eval", "submit", project / "penstock.toml", "--json")
    assert (answer.code, answer.error) == (2, "TOKEN_INVALID")
    monkeypatch.setenv("PENSTOCK_CONTROLLER", "nonsense")
    assert command("eval", "list", "--json").error == "config_error"


def test_train_runs_a_file_named_like_a_command(command):
    assert "penstock.toml: no such file" in command("train").err
    assert "list: no such file" in command("train", "./list").err
    assert "penstock.toml: no such file" in command("train", "--set", "train.steps=1").err
    assert command("train", "run", "absent.toml", "--json").error == "config_error"
    shown = command("train", "--help")
    assert shown.code == 0 and "submit" in shown.out and "run" in shown.out
