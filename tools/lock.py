"""The tested set: `write` locks its versions with the hashes of their files, `install` installs it.

requirements.lock is everything but torch, of which there are two builds. requirements-cpu.lock is the one for the CPU, a file that
some machines have at hand; requirements-cuda.lock is the one of the index, with the CUDA libraries that it needs.
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
CPU_LOCK = ROOT / "requirements-cpu.lock"
CUDA_LOCK = ROOT / "requirements-cuda.lock"
EXTRAS = ("local", "dev", "docs")
PACKAGES = ("packages/controller", "packages/compat")
"""The wheels besides the core."""
CUDA = ("cuda-", "nvidia-", "torch==", "triton==")
HEAD = "# Made by `make lock`; do not edit."
PYTHONS = ((3, 11), (3, 12), (3, 13))
PIP = (sys.executable, "-m", "pip")
EDITABLE = tuple(word for package in PACKAGES for word in ("-e", package))


class Pin(NamedTuple):
    name: str
    version: str
    marker: str
    """Of which platforms and Python versions it is; empty: of all."""


def fits() -> bool:
    """Whether this is a machine that the lock was tried on."""
    return (
        platform.python_implementation() == "CPython"
        and sys.version_info[:2] in PYTHONS
        and (platform.system(), platform.machine(), platform.libc_ver()[0]) == ("Linux", "x86_64", "glibc")
    )


def install() -> None:
    """Where the lock fits, nothing is resolved and every file is checked. Elsewhere pip resolves within constraints.txt."""
    if not fits():
        print("requirements.lock is for Linux x86-64 and CPython 3.11 to 3.13: pip chooses the versions here")
        run(*PIP, "install", "-q", "-c", "constraints.txt", "-e", f".[{','.join(EXTRAS)}]", *EDITABLE)
        return
    locked = (*PIP, "install", "-q", "--no-deps", "--require-hashes", "-r")
    run(*locked, str(LOCK))
    if not (sys.version_info[:2] == PYTHONS[0] and installed(*locked, str(CPU_LOCK))):
        run(*locked, str(CUDA_LOCK))
    if missing := unlocked(LOCK.read_text() + CUDA_LOCK.read_text(), *projects()):
        sys.exit(f"requirements.lock lacks {', '.join(missing)} of pyproject.toml; run: make lock")
    run(*PIP, "install", "-q", "--no-deps", "--no-build-isolation", "-e", ".", *EDITABLE)


def installed(*command: str) -> bool:
    """False, and nothing is installed, if there is no such file here or it has another hash."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return True
    if "DO NOT MATCH THE HASHES" in done.stderr:
        print(f"{CPU_LOCK.name}: the file that is at hand here is another one: the index's build is taken, with its CUDA libraries")
    elif "No matching distribution" not in done.stderr:
        sys.exit(done.stderr + f"failed: {' '.join(command)}")
    return False


def projects() -> list[str]:
    """Returns the texts of every pyproject.toml, the core's first."""
    return [(ROOT / folder / "pyproject.toml").read_text() for folder in ("", *PACKAGES)]


def unlocked(lock: str, *projects: str) -> list[str]:
    """Returns the requirements of the projects that the lock does not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    versions = {pin.name: pin.version for pin in pins(lock)}
    wanted: list[str] = []
    for table in map(tomllib.loads, projects):
        extras: dict[str, list[str]] = table["project"].get("optional-dependencies", {})
        wanted += [*table["build-system"]["requires"], *foreign(table), *(one for name in EXTRAS for one in extras.get(name, ()))]

    def met(requirement: Requirement) -> bool:
        version = versions.get(canonicalize_name(requirement.name))
        return version is not None and requirement.specifier.contains(version, prereleases=True)

    return [one for one in dict.fromkeys(wanted) if not met(Requirement(one))]


def foreign(project: dict[str, Any]) -> list[str]:
    """Returns the dependencies of a project without those on our own wheels."""
    return [one for one in project["project"]["dependencies"] if not one.startswith("penstock-")]


def pins(lock: str) -> list[Pin]:
    return [Pin(*found) for found in re.findall(r"^([a-z0-9-]+)(?:\[[^]]*\])?==([^\s;]+)(?: ; ([^\\\n]+))?", lock, re.MULTILINE)]


def write(*options: str) -> None:
    """Locked versions stay as they are while they meet pyproject.toml; with `--upgrade` they are the newest."""
    extras = [option for extra in EXTRAS for option in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "requirements.txt"
        draft.write_text("".join(file.read_text() for file in (LOCK, CUDA_LOCK) if file.exists()))
        more = Path(folder) / "packages.in"  # not their pyproject.toml: the index does not have the core they depend on
        more.write_text("\n".join(one for text in projects()[1:] for one in foreign(tomllib.loads(text))))
        compile_ = (sys.executable, "-m", "uv", "pip", "compile", "-q", "--universal", "--python-version", "3.11")
        looks = ("--generate-hashes", "--no-header", "--no-annotate")
        run(*compile_, *looks, *extras, "-c", "constraints.txt", "-o", str(draft), *options, "pyproject.toml", str(more))
        packages = re.split(r"\n(?=\S)", draft.read_text().rstrip())
    LOCK.write_text("\n".join([HEAD, *(one for one in packages if not one.startswith(CUDA))]) + "\n")
    CUDA_LOCK.write_text("\n".join([HEAD, *(one for one in packages if one.startswith(CUDA))]) + "\n")
    write_cpu(next(one.split()[0] for one in packages if one.startswith("torch==")))


def write_cpu(torch: str) -> None:
    """Locks the build for the CPU that pip finds here. uv does not look where such files lie."""
    report = run(*PIP, "install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", torch)
    found = json.loads(report)["install"][0]
    version, hashes = found["metadata"]["version"], found["download_info"]["archive_info"]["hashes"]
    if version.endswith("+cpu"):
        CPU_LOCK.write_text(f"{HEAD}\ntorch=={version} \\\n    --hash=sha256:{hashes['sha256']}\n")
    else:
        print(f"pip finds no build of {torch} for the CPU here: {CPU_LOCK.name} stays as it was")


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stdout + f"failed: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    {"install": install, "write": write}[sys.argv[1]](*sys.argv[2:])
