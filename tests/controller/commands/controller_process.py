"""`penstock controller up` as a child process, and commands that call it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.app import run

DEADLINE_S = 90.0


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_HOME", "PENSTOCK_CONTROLLER"))}
    return kept | {"PENSTOCK_HOME": str(home), **more}


def penstock(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "penstock", *map(str, arguments)]


def ran(home: Path, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command, run to its end in a separate process."""
    return subprocess.run(
        penstock(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, env=environment(home), **options
    )


def tiny_project(folder: Path) -> Path:
    """A project whose evaluation takes a moment."""
    assert run(["quickstart", str(folder), "--template", "tiny"]) == 0
    return folder


@dataclass(frozen=True, slots=True)
class ControllerProcess:
    """A running `penstock controller up`."""

    process: "subprocess.Popen[str]"
    ready: dict[str, Any]
    home: Path

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err


@contextmanager
def controller_up(home: Path, *arguments: Any) -> Generator[ControllerProcess]:
    command = penstock("controller", "up", "--port", "0", "--home", home, *arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(home))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=DEADLINE_S)
        yield ControllerProcess(process, json.loads(line), home)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
        end_runs(home)


def end_runs(home: Path) -> None:
    """Kill the monitors that a controller has left at work, and their runs with them."""
    for lock in home.glob("runs/*/keeper.lock"):
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                found = [int(place.name) for place in Path("/proc").glob("[0-9]*") if _keeps(place, lock.parent)]
                for pid in found:
                    os.kill(pid, signal.SIGKILL)


def _keeps(process: Path, run: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"penstock_controller.monitor" in words and str(run).encode() in words


def eventually(question: Callable[[], Any]) -> Any:
    """The first answer that is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := question()):
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)
    return answer
