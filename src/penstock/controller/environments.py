"""The Python of a rollout: this one where it has what the rollout's pyproject.toml asks for, else one made for it and kept."""

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import site
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.system.locks import FileLock

Command = Callable[[list[str]], int]
"""Runs a command to its end, its output to the run's log; the exit code."""

PROVIDED_MODULES = {"penstock": "penstock", "osmosis-ai": "osmosis_ai", "claw-r1": "claw_r1"}
"""Distributions that ours stand in for, by the module that they would bring."""


def requirements(project: Path) -> list[str]:
    """What `[project] dependencies` of the folder's pyproject.toml lists; nothing where there is no such file."""
    file = project / "pyproject.toml"
    if not file.is_file():
        return []
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
        raise ConfigError(f"{file.name}: cannot be read: {cause}") from cause
    listed: Any = tables.get("project", {}).get("dependencies", [])
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"{file.name}: project.dependencies is no list of requirements, such as ['httpx>=0.27']")
    return listed  # pyright: ignore[reportUnknownVariableType]


def missing_requirements(project: Path) -> list[str]:
    """Those of its requirements that this interpreter lacks."""
    return [each for each in requirements(project) if not _is_satisfied(each)]


def prepare_environment(project: Path, kept: Path, run: Command, say: Callable[[str], None]) -> Path:
    """The interpreter to run the project with; ConfigError where what it needs cannot be installed."""
    wanted = missing_requirements(project)
    if not wanted:
        return Path(sys.executable)
    digest = hashlib.sha256("\n".join([sys.executable, sys.version, *sorted(wanted)]).encode()).hexdigest()[:24]
    folder = kept / digest
    kept.mkdir(parents=True, exist_ok=True)
    with FileLock(kept / f"{digest}.lock") as lock:
        lock.acquire()  # blocks while another run makes the same one
        if not (folder / "complete").exists():
            say(f"making an environment with {', '.join(wanted)}")
            shutil.rmtree(folder, ignore_errors=True)  # what a kill left half made
            _create_environment(folder, wanted, run)
    return folder / "bin" / "python"


def _create_environment(folder: Path, wanted: list[str], run: Command) -> None:
    has_pip = importlib.util.find_spec("pip") is not None  # which then need not be copied into each environment
    if code := run([sys.executable, "-m", "venv", *(["--without-pip"] if has_pip else []), str(folder)]):
        raise ConfigError(f"no environment could be made for the rollout: venv ended with exit code {code}; see the lines before")
    beside = "".join(f"import site; site.addsitedir({path!r})\n" for path in _site_folders())
    libraries = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (libraries / "beside.pth").write_text(beside)  # all that is installed here is seen there, behind what is installed there
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    if code := run([*pip, "install", "--disable-pip-version-check", "--no-input", *wanted]):
        text = f"what the rollout's pyproject.toml asks for could not be installed: {', '.join(wanted)}"
        raise ConfigError(f"{text}; pip ended with exit code {code}, see the lines before")
    (folder / "complete").touch()


def _is_satisfied(requirement: str) -> bool:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(requirement)
    except InvalidRequirement as cause:
        raise ConfigError(f"pyproject.toml: {requirement!r} is no requirement: {cause}; write it as name>=version") from cause
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    name = re.sub(r"[-_.]+", "-", wanted.name).lower()
    if name in PROVIDED_MODULES and importlib.util.find_spec(PROVIDED_MODULES[name]) is not None:
        return True
    try:
        found = importlib.metadata.distribution(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    extras = (Requirement(each) for each in found.requires or () if wanted.extras)
    asked = [each for each in extras if each.marker and any(each.marker.evaluate({"extra": extra}) for extra in wanted.extras)]
    plain = all(_installed(each.name) for each in asked)
    return plain and (wanted.url is None) and wanted.specifier.contains(found.version, prereleases=True)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _site_folders() -> Iterable[str]:
    """Where this interpreter has its packages."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
