"""Copies of the archives in this folder, and commands run on them."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import run

HERE = Path(__file__).parent


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The old project as the working folder."""
    monkeypatch.chdir(_unpacked("project", tmp_path))
    return Path()


@pytest.fixture
def home(tmp_path) -> Path:
    """The old controller's folder."""
    return _unpacked("home", tmp_path)


def _unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(HERE / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture
def reported(capsys) -> Callable[..., Any]:
    """Runs a command with --json and returns what it prints."""

    def reported(*arguments: Any) -> Any:
        capsys.readouterr()
        assert run([*map(str, arguments), "--json"]) == 0, capsys.readouterr()
        return json.loads(capsys.readouterr().out)

    return reported
