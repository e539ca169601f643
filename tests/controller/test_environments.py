"""A rollout with its own requirements gets an environment, built once; a failure has a reason."""

import subprocess
import sys
import zipfile
from collections.abc import Generator
from pathlib import Path

import pytest
from core_cases import files_of, lay_out, messages

from penstock.errors import ConfigError
from penstock_controller.environments import missing_requirements, prepare_environment, requirements
from penstock_controller.home import Home
from penstock_controller.monitor import kill_stray_processes
from penstock_controller.runs import ExitRecord, Run, RunFiles


@pytest.fixture
def home(tmp_path: Path) -> Generator[Home]:
    yield Home(tmp_path / "home")
    for folder in (tmp_path / "home" / "runs").glob("*"):
        kill_stray_processes(RunFiles(folder))


def project(folder: Path, *wanted: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'x'\nversion = '1'\ndependencies = {list(wanted)!r}\n")
    return folder


def wheel(folder: Path) -> Path:
    """A package that nobody has."""
    path = folder / "pensmall-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pensmall.py", "WORD = 'small'\n")
        archive.writestr("pensmall-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pensmall\nVersion: 1.0\n")
        archive.writestr(
            "pensmall-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("pensmall-1.0.dist-info/RECORD", "")
    return path


def test_what_this_interpreter_has_needs_no_environment(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "orjson>=3", "penstock", "osmosis-ai[server]>=0.2", "nothing; python_version < '3'")
    assert missing_requirements(folder) == []
    assert prepare_environment(folder, tmp_path / "kept", lambda *_: 1, print) == Path(sys.executable)
    assert requirements(tmp_path) == [] and not (tmp_path / "kept").exists()
    assert missing_requirements(project(tmp_path / "q", "orjson<1", "nosuchthing", "orjson")) == ["orjson<1", "nosuchthing"]


@pytest.mark.parametrize("text", ["[project", "[project]\ndependencies = 'x'\n", "[project]\ndependencies = ['==1']\n"])
def test_bad_pyproject_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        missing_requirements(tmp_path)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def carried_out(home: Home, run: Run) -> ExitRecord:
    command = [sys.executable, "-m", "penstock_controller.monitor", str(files_of(home, run).path)]
    subprocess.run(command, input=b"{}", timeout=120, check=True)
    ending = ExitRecord.read(files_of(home, run))
    assert ending is not None
    return ending


@pytest.mark.slow
@pytest.mark.usefixtures("no_index")
def test_missing_packages_are_installed_once_beside_those_that_are_here(home: Home, tmp_path: Path) -> None:
    folder = project(tmp_path / "p", f"pensmall @ {wheel(tmp_path).as_uri()}", "orjson")
    script = "import pensmall, penstock, orjson\nprint(pensmall.WORD)"
    for name in ("first", "second"):
        run = lay_out(home, script, name, project=str(folder), environments=str(home.environments))
        assert carried_out(home, run).code == 0, messages(home, run)
        assert "small" in messages(home, run)
        made = [line for line in messages(home, run) if line.startswith("making an environment")]
        assert len(made) == (1 if name == "first" else 0)


def test_half_made_environment_is_rebuilt(tmp_path: Path) -> None:
    folder, said, commands = project(tmp_path / "p", "nosuchthing"), list[str](), list[list[str]]()

    def run(command: list[str], filled: Path) -> int:
        assert filled.is_dir() and filled.parent == tmp_path / "kept"
        commands.append(command)
        if "venv" in command:
            (Path(command[-1]) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages").mkdir(parents=True)
        return 0

    python = prepare_environment(folder, tmp_path / "kept", run, said.append)
    assert prepare_environment(folder, tmp_path / "kept", run, said.append) == python and len(commands) == 2
    made = python.parents[1]
    (made / "complete").unlink()
    (made / "junk").touch()
    assert prepare_environment(folder, tmp_path / "kept", run, said.append) == python
    assert not (made / "junk").exists() and (made / "complete").exists() and len(commands) == 4


@pytest.mark.usefixtures("no_index")
def test_missing_package_fails_the_run_with_a_reason(home: Home, tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "nosuchthing==1")
    run = lay_out(home, "print('never')", project=str(folder), environments=str(home.environments))
    ending = carried_out(home, run)
    assert ending.code == 2 and "could not be installed: nosuchthing==1; pip ended with exit code 1" in ending.message
    assert "never" not in messages(home, run)
