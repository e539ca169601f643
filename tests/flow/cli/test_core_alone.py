"""The core wheel works without the other wheels."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests/helpers/tiny_run/train.toml"
ONE_STEP = ("--set", "train.steps=1", "--set", "rollout.groups_per_step=1", "--set", "rollout.group_size=2")
CODE = "import sys; from penstock.cli.app import run; sys.exit(run(sys.argv[1:]))"


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory):
    """The installed packages without ours, but with the core's metadata."""
    folder, installed = tmp_path_factory.mktemp("site"), Path(sysconfig.get_path("purelib"))
    for path in installed.iterdir():
        ours = "penstock" in path.name or path.name in ("osmosis_ai", "claw_r1")
        if path.name.startswith("penstock_rl-") or not ours:
            (folder / path.name).symlink_to(path)
    return folder


def penstock(folder, *arguments, path):
    """Runs a command in an interpreter whose own site-packages lack our wheels."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1"}
    command = [sys._base_executable, "-c", CODE, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def test_help_lacks_commands_of_other_wheels(tmp_path, dependencies):
    path = (ROOT / "src", dependencies)
    reported = penstock(tmp_path, "--help", path=path)
    assert reported.returncode == 0, reported.stderr
    assert {"train", "eval", "doctor", "model"} <= set(reported.stdout.split())
    assert not {"secret", "dataset", "rollout"} & {line.split()[0] for line in reported.stdout.splitlines() if line.strip()}
    assert "submit" not in penstock(tmp_path, "train", "--help", path=path).stdout


def test_experiment_file_names_the_missing_wheel(tmp_path, dependencies):
    (tmp_path / "e.toml").write_text('[experiment]\nrollout = "mine"\n')
    refused = penstock(tmp_path, "train", "e.toml", path=(ROOT / "src", dependencies))
    assert refused.returncode == 2 and "penstock-controller" in refused.stderr


@pytest.mark.slow
def test_core_wheel_trains_and_evaluates(tmp_path, dependencies):
    pytest.importorskip("hatchling")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist"], cwd=ROOT, check=True)
    [wheel] = (tmp_path / "dist").glob("penstock_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    path = (tmp_path / "wheel", dependencies)
    for command in (["train", TINY, *ONE_STEP], ["eval", "run", TINY, "--rows", "0"], ["train", "info", "tiny"], ["model", "list"]):
        folder = () if "info" in command or "list" in command else ("--set", f'run.folder="{tmp_path / "runs"}"')
        done = penstock(tmp_path, *command, *folder, path=path)
        assert done.returncode in (0, 3), done.stderr  # 3: it ran and learned nothing
