"""With --json a failure of any command is one error envelope, the last line on stderr, and nothing on stdout."""

import json

import pytest
import typer.main

from penstock.cli.app import app, run

LINES = {
    "branch": ["nowhere", "rollout"],
    "compare": ["nowhere", "nowhere"],
    "controller approve": ["CODE"],
    "controller register": ["nowhere"],
    "controller revoke": ["nobody"],
    "controller up": ["--home", "taken"],
    "doctor": ["nowhere"],
    "eval compare": ["nowhere", "nowhere"],
    "eval rubric": ["--data", "nowhere.jsonl", "--rubric", "Good?", "--model", "any"],
    "gateway": ["--set", "gateway.no_such=1"],
    "model deploy": ["nothing"],
    "pool export": ["nowhere", "--out", "out"],
    "pool import": ["nowhere", "--into", "out"],
    "quickstart": ["taken"],
    "rollout init": ["no/name"],
    "run": ["--set", "gateway.no_such=1", "--", "true"],
    "secret set": ["KEY", "--env", "NO_SUCH_VARIABLE"],
    "sft": ["nowhere", "--out", "out"],
}
"""Arguments with which a command fails; for all others a name or a file that is not there."""
NEVER_FAIL = {
    "controller status": "that none serves is its result",
    "controller token": "prints what the environment says",
    "template list": "lists what the package has",
}


def leaves(command, path=()):
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


COMMANDS = {name: command for name, command in leaves(typer.main.get_command(app)) if not name.startswith("models ")}


def failing_line(name):
    needed = [each for each in COMMANDS[name].params if each.param_type_name == "argument" and each.required]
    return [*name.split(), *LINES.get(name, ["nowhere"] * len(needed))]


def pulled(reference, progress=None):
    raise AssertionError(f"{reference} would have been pulled")


@pytest.fixture
def empty_place(tmp_path, monkeypatch):
    for name, value in {
        "PENSTOCK_CONTROLLER": "http://127.0.0.1:9",
        "PENSTOCK_CONTROLLER_TOKEN": "x",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # nobody answers: it is tried again a few times
    monkeypatch.setattr("penstock.models.pull.resolve", pulled)  # what is wrong is reported before a model is fetched
    (tmp_path / "taken").write_text("a file where a folder should be")
    monkeypatch.chdir(tmp_path)


def reported(capsys, line, code):
    said = capsys.readouterr()
    assert (said.out, code not in (0, None)) == ("", True), (line, code, said)
    error = json.loads(said.err.splitlines()[-1])["error"]
    assert error["code"] and error["message"] and "Traceback" not in said.err, (line, said)
    return error


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NEVER_FAIL))
def test_what_fails_is_an_error_on_stderr(name, empty_place, capsys):
    line = failing_line(name)
    assert reported(capsys, line, run([*line, "--json"] if name != "run" else ["run", "--json", *line[1:]]))["code"] != "usage"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_line_that_cannot_be_read_is_error_on_stderr(name, empty_place, capsys):
    line = [*name.split(), "--no-such-option", "--json"]
    assert reported(capsys, line, run(line))["code"] == "usage"


@pytest.mark.parametrize("name", sorted({name.partition(" ")[0] for name in COMMANDS if " " in name} - {"train"}))
def test_a_group_without_a_command_is_an_error_on_stderr(name, capsys):
    assert reported(capsys, name, run([name, "--json"]))["code"] == "usage"
