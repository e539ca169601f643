"""Virtual environments for rollouts whose pyproject.toml requires packages that this interpreter lacks. They are reused."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import site
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.system.files import FileLock

Command = Callable[[list[str], Path], int]
"""Runs a command that fills a folder, with its output in the run's log; returns the exit code."""

PROVIDED_MODULES = {"penstock": "penstock", "osmosis-ai": "osmosis_ai", "claw-r1": "claw_r1"}
"""Distributions that penstock and its facades stand in for, with the module that each would install."""


def requirements(project: Path) -> list[str]:
    """Returns `[project] dependencies` of the folder's pyproject.toml; empty if there is no such file."""
    file = project / "pyproject.toml"
    if not file.is_file():
        return []
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
        raise ConfigError(f"{file.name}: cannot be read: {cause}") from cause
    dependencies: Any = tables.get("project", {}).get("dependencies", [])
    if not isinstance(dependencies, list) or not all(isinstance(each, str) for each in dependencies):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"{file.name}: project.dependencies is no list of requirements, such as ['httpx>=0.27']")
    return dependencies  # pyright: ignore[reportUnknownVariableType]


def missing_requirements(project: Path) -> list[str]:
    """Returns the requirements that this interpreter does not satisfy."""
    return [each for each in requirements(project) if not _is_satisfied(each)]


def prepare_environment(project: Path, environments: Path, run: Command, log: Callable[[str], None]) -> Path:
    """Returns the interpreter to run the project with; ConfigError if its requirements cannot be installed."""
    missing = missing_requirements(project)
    if not missing:
        return Path(sys.executable)
    digest = hashlib.sha256("\n".join([sys.executable, sys.version, *sorted(missing)]).encode()).hexdigest()[:24]
    folder = environments / digest
    environments.mkdir(parents=True, exist_ok=True)
    with FileLock(environments / f"{digest}.lock") as lock:
        lock.acquire()  # waits while another run creates the same environment
        if not (folder / "complete").exists():
            log(f"making an environment with {', '.join(missing)}")
            shutil.rmtree(folder, ignore_errors=True)  # a killed process left it incomplete
            folder.mkdir()
            _create_environment(folder, missing, run)
    return folder / "bin" / "python"


def _create_environment(folder: Path, packages: list[str], run: Command) -> None:
    has_pip = importlib.util.find_spec("pip") is not None  # then it can install into the environment from outside
    if code := run([sys.executable, "-m", "venv", *(["--without-pip"] if has_pip else []), str(folder)], folder):
        raise ConfigError(f"no environment could be made for the rollout: venv ended with exit code {code}; see the lines before")
    added = "".join(f"import site; site.addsitedir({path!r})\n" for path in _site_folders())
    libraries = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (libraries / "beside.pth").write_text(added)  # adds this interpreter's packages after those of the environment
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    if code := run([*pip, "install", "--disable-pip-version-check", "--no-input", *packages], folder):
        text = f"what the rollout's pyproject.toml asks for could not be installed: {', '.join(packages)}"
        raise ConfigError(f"{text}; pip ended with exit code {code}, see the lines before")
    os.close(os.open(folder / "complete", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW))  # a package might have left a link


def _is_satisfied(requirement: str) -> bool:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        required = Requirement(requirement)
    except InvalidRequirement as cause:
        raise ConfigError(f"pyproject.toml: {requirement!r} is no requirement: {cause}; write it as name>=version") from cause
    if required.marker is not None and not required.marker.evaluate():
        return True
    name = re.sub(r"[-_.]+", "-", required.name).lower()
    if name in PROVIDED_MODULES and importlib.util.find_spec(PROVIDED_MODULES[name]) is not None:
        return True
    try:
        installed = importlib.metadata.distribution(required.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    dependencies = [Requirement(each) for each in installed.requires or ()] if required.extras else []
    of_extras = [
        each for each in dependencies if each.marker and any(each.marker.evaluate({"extra": extra}) for extra in required.extras)
    ]
    has_extras = all(_is_installed(each.name) for each in of_extras)
    return has_extras and required.url is None and required.specifier.contains(installed.version, prereleases=True)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _site_folders() -> Iterable[str]:
    """Returns the site-packages folders of this interpreter."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
