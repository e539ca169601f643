"""The tested set: `write` locks its versions with the hashes of their files, `install` installs it.

requirements.lock is everything that the tests need. requirements-cuda.lock is what torch's build for CUDA needs besides: the build for the CPU goes without.
"""

import importlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
CUDA_LOCK = ROOT / "requirements-cuda.lock"
EXTRAS = ("local", "dev", "docs")
CUDA = ("cuda-", "nvidia-", "triton==")
PYTHONS = ((3, 11), (3, 12), (3, 13))
PIP = (sys.executable, "-m", "pip")


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
        run(*PIP, "install", "-q", "-c", "constraints.txt", "-e", f".[{','.join(EXTRAS)}]", "-e", "facades")
        return
    locked = (*PIP, "install", "-q", "--no-deps", "--require-hashes", "-r")
    run(*locked, str(LOCK))
    importlib.invalidate_caches()
    if not metadata.version("torch").endswith("+cpu"):
        run(*locked, str(CUDA_LOCK))
    if missing := unlocked(LOCK.read_text(encoding="utf-8"), (ROOT / "pyproject.toml").read_text(encoding="utf-8")):
        sys.exit(f"requirements.lock lacks {', '.join(missing)} of pyproject.toml; run: make lock")
    run(*PIP, "install", "-q", "--no-deps", "--no-build-isolation", "-e", ".", "-e", "facades")


def unlocked(lock: str, project: str) -> list[str]:
    """Requirements of the project that the lock does not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    versions = dict(pins(lock))
    table = tomllib.loads(project)
    extras = table["project"]["optional-dependencies"]
    wanted = [*table["build-system"]["requires"], *table["project"]["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]

    def met(requirement: Requirement) -> bool:
        version = versions.get(canonicalize_name(requirement.name))
        return version is not None and requirement.specifier.contains(version, prereleases=True)

    return [one for one in wanted if not met(Requirement(one))]


def pins(lock: str) -> Iterator[tuple[str, str]]:
    """Name and version of each locked package; of several by the Python version the last."""
    yield from re.findall(r"^([a-z0-9-]+)(?:\[[^]]*\])?==([^\s;]+)", lock, re.MULTILINE)


def write(*options: str) -> None:
    """Locked versions stay as they are while they meet pyproject.toml; with `--upgrade` they are the newest."""
    extras = [option for extra in EXTRAS for option in ("--extra", extra)]
    before = "".join(file.read_text(encoding="utf-8") for file in (LOCK, CUDA_LOCK) if file.exists())
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "requirements.txt"
        draft.write_text(before, encoding="utf-8")
        compile_ = (sys.executable, "-m", "uv", "pip", "compile", "-q", "--universal", "--python-version", "3.11", "--generate-hashes")
        run(*compile_, "--no-header", "--no-annotate", *extras, "-c", "constraints.txt", "-o", str(draft), *options, "pyproject.toml")
        packages = re.split(r"\n(?=\S)", draft.read_text(encoding="utf-8").rstrip())
    packages = [with_other_builds(package, before) if package.startswith("torch==") else package for package in packages]
    head = "# Made by `make lock`; do not edit."
    LOCK.write_text("\n".join([head, *(one for one in packages if not one.startswith(CUDA))]) + "\n", encoding="utf-8")
    CUDA_LOCK.write_text("\n".join([head, *(one for one in packages if one.startswith(CUDA))]) + "\n", encoding="utf-8")


def with_other_builds(torch: str, before: str) -> str:
    """Adds the build for the CPU, which is not on the index under this version: the one that pip finds here, and those of the lock before."""
    pin = torch.split()[0]
    report = run(*PIP, "install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", pin)
    here = json.loads(report)["install"][0]["download_info"]["archive_info"]["hashes"]["sha256"]
    earlier = re.search(rf"^{re.escape(pin)} .*?(?=\n\S)", before, re.MULTILINE | re.DOTALL)
    known = re.findall(r"sha256:(\w+)", f"{torch} sha256:{here} {earlier[0] if earlier else ''}")
    return " \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in sorted(set(known)))])


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stdout + f"failed: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    {"install": install, "write": write}[sys.argv[1]](*sys.argv[2:])
