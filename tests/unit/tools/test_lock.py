"""The tested set is locked with hashes, and the lock meets what the project asks for."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import lock
import pytest
from lock import CPU_LOCK, CUDA_LOCK, LOCK, pins, projects, unlocked

ROOT = Path(__file__).parents[3]
LOCKED = LOCK.read_text() + CUDA_LOCK.read_text()


def test_the_lock_meets_every_requirement_of_the_project() -> None:
    assert unlocked(LOCKED, *projects()) == []


@pytest.mark.parametrize("asked", ['"not-locked-yet>=1"', '"ruff>=999"'])
def test_a_requirement_that_the_lock_does_not_meet_is_named(asked: str) -> None:
    assert unlocked(LOCKED, projects()[0].replace('"ruff>=0.9"', asked)) == [asked.strip('"')]


@pytest.mark.parametrize("file", [LOCK, CPU_LOCK, CUDA_LOCK], ids=lambda file: file.name)
def test_every_locked_file_has_hash_and_no_address_is_named(file: Path) -> None:
    entry = re.compile(r"\S+==\S+(?: ; [^\\]+?)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+")
    head, *packages = re.split(r"\n(?=\S)", file.read_text().rstrip())
    assert head.startswith("# ") and len(packages) == len(pins(file.read_text())) > 0
    assert [one.split()[0] for one in packages if not entry.fullmatch(one)] == []


def test_both_builds_of_torch_are_the_pinned_version() -> None:
    [for_cpu] = pins(CPU_LOCK.read_text())
    [for_cuda] = [pin for pin in pins(CUDA_LOCK.read_text()) if pin.name == "torch"]
    assert f"torch=={for_cuda.version}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert for_cpu.version == f"{for_cuda.version}+cpu"
    assert "torch" not in {pin.name for pin in pins(LOCK.read_text())}


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    """pip is given a wheel under a locked name and version: it refuses what is not the locked file."""
    [pin] = [pin for pin in pins(LOCK.read_text()) if pin.name == "six"]
    info = f"six-{pin.version}.dist-info"
    wheel = tmp_path / f"six-{pin.version}-py2.py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("six.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: six\nVersion: {pin.version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py2-none-any\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    locked = tmp_path / "requirements.lock"
    locked.write_text(next(one for one in re.split(r"\n(?=\S)", LOCK.read_text()) if one.startswith("six==")))
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "--no-index", "--find-links", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | {
        "PIP_CONFIG_FILE": os.devnull
    }
    done = subprocess.run(
        [*pip, "--target", str(tmp_path / "into"), "-r", str(locked)], env=environment, capture_output=True, text=True
    )
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr and not (tmp_path / "into").exists()


@pytest.mark.parametrize("fits", [True, False])
def test_install_takes_lock_where_it_fits_and_constraints_elsewhere(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(lock, "fits", lambda: fits)
    monkeypatch.setattr(
        lock, "run", lambda *command: said.append(" ".join(command))
    )  # no seam: it would install into this environment
    lock.install()
    hashed = [line for line in said if "--require-hashes" in line]
    assert bool(hashed) == fits and all("--no-deps" in line for line in hashed)
    assert any("-c constraints.txt" in line for line in said) != fits
    assert said[-1].endswith("-e packages/controller -e packages/compat")


def test_no_command_of_ours_fetches_penstock_from_the_index() -> None:
    """There the name is another project's, with and without an extra."""
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/*.md"),
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("packages/*/src/**/*.py"),
        *ROOT.glob("examples/**/*.toml"),
    ]
    fetching = re.compile(r"penstock\[|(?:pip|pipx|uv tool) install [^\n`]*(?:penstock-compat|(?<![\w./])penstock(?![\w/]))")
    assert {str(file): found for file in files if (found := fetching.findall(file.read_text()))} == {}
