"""One controller for the tests of a file, and commands run in this process against it."""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from controller_process import ControllerProcess, controller_up, tiny_project

from penstock.cli.app import run


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one line on stdout, or the error on stderr."""
        assert self.out.count("\n") == (1 if self.out else 0), self
        return json.loads(self.out or self.err.splitlines()[-1])

    @property
    def error(self) -> str:
        """The code of a refusal."""
        return self.json["error"]["code"]


Command = Callable[..., CommandResult]


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Generator[ControllerProcess]:
    with controller_up(tmp_path_factory.mktemp("controller") / "home", "--runs", "2") as up:
        yield up


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return tiny_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def command(serving, capsys, monkeypatch, tmp_path) -> Command:
    """Runs a command in an empty folder against the file's controller."""
    monkeypatch.setenv("PENSTOCK_HOME", str(serving.home))
    monkeypatch.delenv("PENSTOCK_CONTROLLER", raising=False)
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: Any) -> CommandResult:
        code = run([str(each) for each in arguments])
        return CommandResult(code, *capsys.readouterr())

    return run_command
