"""The rim of the command line: errors to one line, exit codes, JSON."""

import json
import subprocess
import sys

import pytest
import typer

from penstock import __version__
from penstock.cli import app as edge
from penstock.errors import ControllerError, DatasetError, EngineError, Issue, TrainError, combine_issues


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = edge.run(list(arguments))
    reported = capsys.readouterr()
    return code, reported.out, reported.err


@pytest.fixture
def failing(monkeypatch):
    """An app whose `fail` command raises what it received to."""

    def use(error: BaseException) -> None:
        app = typer.Typer(cls=edge.SectionedGroup, pretty_exceptions_enable=False)

        @app.callback()
        def root() -> None: ...

        @app.command()
        def fail(as_json: bool = typer.Option(False, "--json")) -> None:
            raise error

        monkeypatch.setattr(edge, "app", app)  # no command of ours raises all of these

    return use


def test_the_version_is_printed(capsys):
    assert run(capsys, "--version") == (0, f"penstock {__version__}\n", "")


def test_alone_it_shows_what_to_do_first(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    for shown in ("penstock quickstart", "penstock train", "penstock view", "penstock -h"):
        assert shown in out


@pytest.mark.parametrize("arguments", [("-h",), ("--help",)])
def test_help_names_every_command_and_the_exit_codes(capsys, arguments):
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    for shown in ("train", "report", "verify", "models", "doctor", "130"):
        assert shown in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify",), "Missing argument 'RUN'"),
        (("fly",), "No such command 'fly'"),
        (("train", "a.toml", "--fast"), "No such option: --fast"),
        (("train", "a.toml", "--set"), "--set"),
    ],
)
def test_unreadable_command_line_is_one_line_and_code_2(capsys, arguments, said):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_group_of_commands_without_one_shows_its_help(capsys):
    code, out, err = run(capsys, "models")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: penstock models")
    assert "\n  pull " in err


@pytest.mark.parametrize(
    ("error", "code"), [(DatasetError("row 3 is empty"), 2), (EngineError("out of memory"), 1), (TrainError("x"), 1)]
)
def test_error_of_ours_is_one_line_with_code_of_kind(capsys, failing, error, code):
    failing(error)
    assert run(capsys, "fail") == (code, "", f"penstock: {error}\n")


def test_error_in_several_lines_is_reported_in_one(capsys, failing):
    failing(TrainError("first\n  second\n"))
    assert run(capsys, "fail")[2] == "penstock: first second\n"


def test_with_json_an_error_is_an_object_on_stderr(capsys, failing):
    failing(DatasetError("row 3 is empty"))
    code, out, err = run(capsys, "fail", "--json")
    assert (code, out) == (2, "")
    assert json.loads(err) == {"error": {"code": "dataset_error", "message": "row 3 is empty"}}


def test_with_json_a_usage_error_is_an_object_too(capsys):
    code, out, err = run(capsys, "verify", "--json")
    assert (code, out) == (2, "")
    assert json.loads(err)["error"]["code"] == "usage"


def test_several_problems_are_line_each_and_list_in_json(capsys, failing):
    failing(combine_issues("a.toml", [Issue("train.lr", "train.lr is too large"), Issue("line 3", "no prompt", "prompt")]))
    code, out, err = run(capsys, "fail")
    assert (code, out) == (2, "")
    assert err == "penstock: a.toml: 2 problems\n  train.lr is too large\n  line 3: no prompt; did you mean 'prompt'?\n"
    reported = json.loads(run(capsys, "fail", "--json")[2])["error"]
    assert reported["message"] == "a.toml: 2 problems"
    assert reported["issues"][1] == {"key": "line 3", "message": "no prompt", "correction": "prompt"}


@pytest.mark.parametrize(("status", "code"), [(None, 1), (404, 2), (401, 2), (409, 2), (429, 1), (503, 1)])
def test_a_controllers_refusal_keeps_its_code_and_its_issues(capsys, failing, status, code):
    answer = {"issues": [{"key": "a", "message": "a is wrong", "key_correction": None}, "b is wrong"]}
    failing(ControllerError("2 problems", code="RUN_REFUSED", status=status, details=answer))
    assert run(capsys, "fail") == (code, "", "penstock: 2 problems\n  a is wrong\n  b is wrong\n")
    assert json.loads(run(capsys, "fail", "--json")[2])["error"]["code"] == "RUN_REFUSED"


def test_ctrl_c_at_a_question_is_130_and_no_traceback(capsys, failing):
    failing(typer.Abort())
    code, out, err = run(capsys, "fail")
    assert (code, out) == (130, "") and "nothing was done" in err


def test_ctrl_c_outside_of_training_is_130(capsys, failing):
    failing(KeyboardInterrupt())
    assert run(capsys, "fail")[0] == 130


INTERRUPTED_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "{module}.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from {script} import main
main()
"""


@pytest.mark.parametrize(
    ("command", "module", "script"),
    [("penstock", "penstock", "penstock.__main__"), ("osmosis", "osmosis_ai", "osmosis_ai.cli")],  # as pyproject.toml names them
)
def test_ctrl_c_while_a_command_is_imported_is_one_line(command, module, script):
    code = INTERRUPTED_IMPORT.format(module=module, script=script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"\n{command}: stopped by Ctrl-C\n")


def test_a_bug_of_ours_is_not_hidden(capsys, failing):
    failing(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        edge.run(["fail"])


def test_group_of_our_errors_is_reported_as_its_first(capsys, failing):
    failing(ExceptionGroup("tasks", [ExceptionGroup("inner", [TrainError("the disk is full")]), EngineError("closed")]))
    assert run(capsys, "fail") == (1, "", "penstock: the disk is full\n")


def test_a_group_with_a_bug_in_it_is_not_hidden(failing):
    failing(ExceptionGroup("tasks", [TrainError("the disk is full"), ZeroDivisionError("a bug")]))
    with pytest.raises(ExceptionGroup):
        edge.run(["fail"])


def test_train_help_shows_options_of_run_and_h_is_help(capsys):
    code, out, _ = run(capsys, "train", "-h")
    assert code == 0
    for said in ("--set SECTION.KEY=VALUE", "--fresh", "--allow-code-change", "--dry-run", "[FILE.toml]"):
        assert said in out
    for arguments in (("-h",), ("eval", "-h"), ("eval", "run", "-h"), ("pool", "-h")):
        assert run(capsys, *arguments)[0] == 0


def test_commands_for_a_controller_stand_apart(capsys):
    for group in ("train", "eval"):
        here, apart = run(capsys, group, "--help")[1].split("Commands for runs on a controller:")
        assert all(f"\n  {name} " in apart for name in ("submit", "stop", "download"))
        assert all(f"\n  {name} " in here for name in ("run", "list", "info", "logs"))


def test_shell_completion_can_be_installed(capsys):
    assert "--install-completion" in run(capsys, "--help")[1]


def test_ctrl_c_in_a_command_is_130_and_one_line(capsys, failing):
    failing(KeyboardInterrupt())
    assert run(capsys, "fail") == (130, "", "\npenstock: stopped by Ctrl-C\n")
    assert json.loads(run(capsys, "fail", "--json")[2])["error"]["code"] == "interrupted"
