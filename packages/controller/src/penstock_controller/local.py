"""Finds the controller for a command: the one named in the environment, else the user's own, which is started if needed."""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import ConfigError, ControllerError
from penstock.system.files import FileLock, is_locked, write_file
from penstock.system.processes import last_line, module_command, spawn_detached
from penstock_controller.client import ControllerClient
from penstock_controller.home import Home, default_home

START_TIMEOUT_S = 60.0
"""For a controller to start serving."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    """URL and process of a controller on this machine."""

    url: str
    pid: int


def find_controller(git: str | None = None) -> ControllerClient:
    """Returns a client for $PENSTOCK_CONTROLLER, else for the controller of the user's home folder, started if needed."""
    if (named := named_controller(git)) is not None:
        return named
    home = default_home().create()
    address = find_running(home) or start_controller(home)
    return ControllerClient(address.url, home.token(), git)


def named_controller(git: str | None = None) -> ControllerClient | None:
    """Returns a client for $PENSTOCK_CONTROLLER with $PENSTOCK_CONTROLLER_TOKEN; None if it is not set."""
    url = os.environ.get("PENSTOCK_CONTROLLER", "").strip()
    if not url:
        return None
    token = os.environ.get("PENSTOCK_CONTROLLER_TOKEN", "").strip()
    if not token:
        text = "PENSTOCK_CONTROLLER is set, PENSTOCK_CONTROLLER_TOKEN is not"
        raise ConfigError(f"{text}; to see what to set, run on the controller's machine: penstock controller token")
    return ControllerClient(url, token, git)


def find_running(home: Home) -> ControllerAddress | None:
    """Returns the address of the controller that serves this folder; None if none answers."""
    address = read_address(home)
    if address is None:
        return None
    try:
        # another program may have the port of a killed controller: only this folder's controller accepts its token
        ControllerClient(address.url, home.token(), timeout_s=10.0).verify()
    except ControllerError:
        return None
    return address


def read_address(home: Home) -> ControllerAddress | None:
    """Returns the address that the last controller of this folder published; it may have ended."""
    try:
        found: Any = orjson.loads(home.address.read_bytes())
        return ControllerAddress(str(found["url"]), int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def publish_address(home: Home, url: str) -> Generator[ControllerAddress]:
    """Publishes the address of this process in the home folder; removes it on exit."""
    address = ControllerAddress(url, os.getpid())
    write_file(home.address, orjson.dumps({"url": address.url, "pid": address.pid}))
    try:
        yield address
    finally:
        home.address.unlink(missing_ok=True)


def start_controller(home: Home) -> ControllerAddress:
    """Starts a controller in the background, or waits for one that another client starts. It outlives this process."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with _exclusive_lock(home.path / "starting.lock"):
        pid: int | None = None
        while time.monotonic() < deadline:
            if (found := find_running(home)) is not None:
                return found
            if pid is None and is_unserved(home):
                pid = _spawn(home)
            elif pid is not None and _ended(pid) and is_unserved(home):
                raise ControllerError(f"the controller did not start: {_last_line(home.log)}", code="CONTROLLER_START_FAILED")
            time.sleep(POLL_S)
    raise ControllerError(
        f"the controller does not serve after {START_TIMEOUT_S:g} s; see {home.log}", code="CONTROLLER_START_FAILED"
    )


def is_unserved(home: Home) -> bool:
    """Whether no process holds the folder's lock, not even one that starts or stops."""
    return not is_locked(home.lock)


def _spawn(home: Home) -> int:
    arguments = ["controller", "up", "--home", str(home.path.absolute()), "--port", "0"]
    return spawn_detached([*module_command("penstock"), *arguments], log=home.log)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _last_line(log: Path) -> str:
    with suppress(OSError):
        if line := last_line(log.read_text(errors="replace")):
            return f"{line.removeprefix('penstock: ')} ({log})"
    return f"see {log}"


@contextmanager
def _exclusive_lock(lock: Path) -> Generator[None]:
    """Only one client at a time starts a controller."""
    try:
        file_lock = FileLock(lock, mode=0o600)
    except OSError as cause:
        raise ConfigError(f"{lock}: cannot be written: {cause.strerror}; set PENSTOCK_HOME to a writable place") from cause
    with file_lock:
        file_lock.acquire()
        yield
