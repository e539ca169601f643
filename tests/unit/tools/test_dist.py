"""What `make dist` writes: the same bytes wherever it is built, a bill of materials, and no licence that does not fit."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import sbom
from lock import LOCK, pins

ROOT = Path(__file__).parents[3]
MESSAGE = "hatchling is not installed: make install"


def built(source: Path, into: Path, *options: str) -> dict[str, str]:
    """The digests of what is built of both projects: wheels and source archives."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1800000000"}
    for project in (source, source / "packages/controller", source / "packages/compat"):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-d", into, *options],
            cwd=project,
            env=environment,
            check=True,
            timeout=100,
        )
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in into.iterdir()}


@pytest.mark.slow
def test_two_builds_in_different_folders_have_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason=MESSAGE)
    first, second = tmp_path / "first", tmp_path / "second" / "of" / "another" / "depth"
    for folder in (first, second):
        for name in ("src", "packages", "examples"):
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "runs", ".penstock")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
            shutil.copy(ROOT / name, folder)
    for file in second.rglob("*.py"):
        file.chmod(0o600)
        os.utime(file, (1, 1))
    one, other = built(first, tmp_path / "one"), built(second, tmp_path / "other")
    assert len(one) == 6 and one == other
    assert_complete(tmp_path / "one", first)
    with tarfile.open(tmp_path / "one" / "penstock_rl-0.1.0.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    again = built(tmp_path / "penstock_rl-0.1.0", tmp_path / "again", "-t", "wheel")
    assert again == {name: digest for name, digest in one.items() if name.endswith(".whl")}


def assert_complete(folder: Path, source: Path) -> None:
    for wheel, place in (("rl", "src"), ("controller", "packages/controller/src"), ("compat", "packages/compat/src")):
        packages = source / place
        with zipfile.ZipFile(next(folder.glob(f"penstock_{wheel}-*.whl"))) as archive:
            names = archive.namelist()
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        files = (Path(folder) / name for folder, _, names in os.walk(packages, followlinks=True) for name in names)
        wanted = {str(file.relative_to(packages)) for file in files}
        assert {name for name in names if ".dist-info/" not in name} == wanted


def test_every_locked_package_that_is_installed_has_licence_that_fits() -> None:
    installed = {sbom.canonicalize_name(one.name): sbom.licence(one.metadata.json) for one in metadata.distributions()}
    locked = {name: installed[name] for name in {pin.name for pin in pins(LOCK.read_text())} if name in installed}
    assert len(locked) > 100 and {name: reported for name, reported in locked.items() if not sbom.fitting(reported)} == {}


def test_an_unknown_licence_and_a_foreign_one_do_not_fit() -> None:
    assert sbom.licence({"license": "MIT License\n\nPermission is granted"}) == "MIT"
    assert sbom.licence({"classifier": ["License :: OSI Approved :: Apache Software License"]}) == "Apache-2.0"
    assert not any(sbom.fitting(one) for one in ("", "AGPL-3.0-only", "MIT AND GPL-3.0-only", "Proprietary", sbom.licence({})))


def test_bill_of_materials_lists_packages_licences_and_dependencies() -> None:
    packages = [sbom.Package("a", "1", "MIT", ["b", "elsewhere"]), sbom.Package("b", "2", "ISC", [])]
    reported = sbom.bill(packages, "0.1.0")
    assert [(one["purl"], one["licenses"]) for one in reported["components"]] == [
        ("pkg:pypi/a@1", [{"expression": "MIT"}]),
        ("pkg:pypi/b@2", [{"expression": "ISC"}]),
    ]
    assert {one["ref"]: one["dependsOn"] for one in reported["dependencies"]} == {
        "penstock-rl": ["pkg:pypi/a@1", "pkg:pypi/b@2"],
        "pkg:pypi/a@1": ["pkg:pypi/b@2"],
        "pkg:pypi/b@2": [],
    }
