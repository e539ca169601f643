"""`penstock doctor`: checks of this machine, one function each, with a remedy for what is missing."""

import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Literal

import orjson
import typer

from penstock.config import ModelSection, cache_folder
from penstock.models import find_cached
from penstock.system.packages import install_command

GB = 1024**3
DISK_NEEDED, DISK_WANTED = 2 * GB, 8 * GB
"""The embedded model is 0.5 GB and a checkpoint with its optimizer 1.6 GB; two are kept while a third is written."""
MEMORY_NEEDED, MEMORY_WANTED = 2 * GB, 4 * GB
"""Weights, gradients and optimizer of the embedded model are 2.1 GB; activations and the engine's cache come on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check. A `note` does not prevent training, a `fail` does."""

    name: str
    state: Literal["ok", "note", "fail"]
    found: str
    remedy: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False) -> None:
    """Check that training can run on this machine (exit code 1 if not), with a remedy for all that is missing."""
    print_checks(run_checks(), as_json=as_json)


def print_checks(checks: list[Check], *, fixed: Sequence[str] = (), as_json: bool) -> None:
    """Prints the checks and what was fixed, and exits."""
    passed = all(check.state != "fail" for check in checks)
    result = {"ok": passed, "fixed": list(fixed), "checks": [asdict(check) for check in checks]}
    typer.echo(orjson.dumps(result).decode() if as_json else as_text(checks))
    raise typer.Exit(0 if passed else 1)


def as_text(checks: list[Check]) -> str:
    """One line per check, the remedy below it, the verdict last."""
    width = max(len(check.name) for check in checks) + 2
    lines: list[str] = []
    for check in checks:
        first, *more = wrap(check.found, 80 - width - 6, break_long_words=False, break_on_hyphens=False)
        lines.append(f"{check.state:<6}{check.name:<{width}}{first}")
        lines += [f"{'':<6}{'':<{width}}{line}" for line in more]
        if check.remedy:
            lines.append(f"{'':<6}{'':<{width}}→ {check.remedy}")
    failed = sum(check.state == "fail" for check in checks)
    verdict = f"Training cannot run here: {failed} of {len(checks)} checks failed." if failed else "Training can run here."
    return "\n".join([*lines, "", verdict])


def run_checks() -> list[Check]:
    """All checks, in the order in which to fix them."""
    version = Check(name="penstock", state="ok", found=metadata.version("penstock-rl"))
    return [python(), version, *packages(), torch_device(), memory(), disk(), cache(), model(), loopback()]


def python() -> Check:
    return Check(name="python", state="ok", found=f"{platform.python_version()} in {sys.prefix}")


def packages(wheel: str = "penstock-rl", *, label: str = "core") -> Iterator[Check]:
    """Checks the requirements of an installed wheel and of its extras; imports nothing. `label` names those without an extra."""
    wanted: dict[str, list[str]] = {}
    for requirement in metadata.requires(wheel) or []:
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", requirement)
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0]
        if not name.startswith("penstock-"):
            wanted.setdefault(extra.group(1) if extra else "", []).append(name)
    wanted.pop("dev", None)  # for those who work on penstock itself
    for extra, names in wanted.items():
        yield _extra(extra, names, wheel, extra or label)


def _extra(extra: str, names: list[str], wheel: str, label: str) -> Check:
    versions = {name: _version(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        return Check(name=label, state="ok", found=", ".join(f"{name} {version}" for name, version in versions.items()))
    state = "fail" if extra in ("", "local") else "note"
    remedy = install_command(extra, wheel=wheel) if extra else f"pip install {' '.join(missing)}"
    return Check(name=label, state=state, found=f"not installed: {', '.join(missing)}", remedy=remedy)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch_device() -> Check:
    try:
        import torch
    except ImportError as cause:
        return Check(name="device", state="fail", found=f"torch cannot be imported: {cause}", remedy=install_command("local"))
    if torch.cuda.is_available():
        return Check(name="device", state="ok", found=f"cuda: {torch.cuda.get_device_name()}")
    return Check(name="device", state="ok", found=f"cpu, {torch.get_num_threads()} threads")


def memory() -> Check:
    free = _free_memory()
    if free is None:
        return Check(name="memory", state="note", found="cannot be read on this system")
    return _free_space("memory", free, MEMORY_NEEDED, MEMORY_WANTED, remedy="close other programs, or train a smaller model")


def disk() -> Check:
    """Check the disk of the current folder, where runs are written."""
    return _free_space(
        "disk", shutil.disk_usage(Path.cwd()).free, DISK_NEEDED, DISK_WANTED, remedy="free some, or set run.folder elsewhere"
    )


def _free_space(name: str, free: int, needed: int, wanted: int, *, remedy: str) -> Check:
    found = f"{free / GB:.1f} GB free"
    if free >= wanted:
        return Check(name=name, state="ok", found=found)
    return Check(
        name=name, state="fail" if free < needed else "note", found=f"{found}; {wanted / GB:.0f} GB are comfortable", remedy=remedy
    )


def _free_memory() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        return int(available.group(1)) * 1024 if available else None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def cache() -> Check:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as cause:
        return Check(
            name="cache",
            state="fail",
            found=f"{folder} cannot be written: {cause.strerror}",
            remedy="set PENSTOCK_CACHE to a writable folder",
        )
    return Check(name="cache", state="ok", found=str(folder))


def model() -> Check:
    """Check the default model."""
    name = ModelSection().name
    found = find_cached(name)
    if found is None:
        remedy = f"the first run fetches it; or fetch it now: penstock model pull {name}"
        return Check(name="model", state="note", found=f"{name} is not here yet", remedy=remedy)
    return Check(name="model", state="ok", found=f"{name} in {found.path}")


def loopback() -> Check:
    """Check that a port can be bound: agents reach the gateway over the loopback interface."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as cause:
        return Check(
            name="loopback",
            state="fail",
            found=f"no port of 127.0.0.1 can be bound: {cause.strerror}",
            remedy="allow local sockets in this sandbox or container",
        )
    return Check(name="loopback", state="ok", found="a port of 127.0.0.1 can be bound")
