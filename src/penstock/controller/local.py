"""Which controller a command talks to: the one that the environment names, else this user's own, started where it does not run."""

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.controller.client import ControllerClient
from penstock.controller.home import Home, default_home
from penstock.errors import ConfigError, ControllerError
from penstock.system.files import write_file
from penstock.system.locks import FileLock, is_locked

START_TIMEOUT_S = 60.0
"""How long a controller has to begin to serve."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    """Where a controller of this machine serves, and which process it is."""

    url: str
    pid: int


def find_controller(git: str | None = None) -> ControllerClient:
    """$PENSTOCK_CONTROLLER with $PENSTOCK_CONTROLLER_TOKEN, else the controller of the user's own folder, started if need be."""
    if (named := named_controller(git)) is not None:
        return named
    home = default_home().make()
    address = find_running(home) or start_controller(home)
    return ControllerClient(address.url, home.token(), git)


def named_controller(git: str | None = None) -> ControllerClient | None:
    """The controller that the environment names; None where it names none."""
    url = os.environ.get("PENSTOCK_CONTROLLER", "").strip()
    if not url:
        return None
    token = os.environ.get("PENSTOCK_CONTROLLER_TOKEN", "").strip()
    if not token:
        text = "PENSTOCK_CONTROLLER is set, PENSTOCK_CONTROLLER_TOKEN is not"
        raise ConfigError(f"{text}; what to set tells on the controller's machine: penstock controller token")
    return ControllerClient(url, token, git)


def find_running(home: Home) -> ControllerAddress | None:
    """The controller that serves this folder now."""
    address = read_address(home)
    if address is None:
        return None
    try:
        # another program may have got the port of one that was killed: only this folder's controller knows its token
        ControllerClient(address.url, home.token(), timeout_s=10.0).verify()
    except ControllerError:
        return None
    return address


def read_address(home: Home) -> ControllerAddress | None:
    """What the last controller of this folder wrote; it may be gone."""
    try:
        found: Any = orjson.loads(home.address.read_bytes())
        return ControllerAddress(str(found["url"]), int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def publish_address(home: Home, url: str) -> Generator[ControllerAddress]:
    """Tell clients of this machine, while this lasts, that this process serves the folder."""
    address = ControllerAddress(url, os.getpid())
    write_file(home.address, orjson.dumps({"url": address.url, "pid": address.pid}))
    try:
        yield address
    finally:
        home.address.unlink(missing_ok=True)


def start_controller(home: Home) -> ControllerAddress:
    """Start a controller in the background, or wait for the one that another client is starting; it outlives us."""
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
    """Whether no process serves this folder, or is about to, or has not quite stopped."""
    return not is_locked(home.lock)


def _spawn(home: Home) -> int:
    """`penstock controller up` in a session of its own, so that no Ctrl-C here reaches it."""
    command = [sys.executable, "-P", "-m", "penstock", "controller", "up", "--home", str(home.path.absolute()), "--port", "0"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(home.log), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, command, dict(os.environ), file_actions=files, setsid=True)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f"{lines[-1].removeprefix('penstock: ')} ({log})"
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
