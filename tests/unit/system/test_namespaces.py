"""A process that confines itself, and reports what it can still do.

It is a new one: libraries start threads in what is forked from this one (OpenTelemetry does), and it must have one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout.processes.fork_server import why_no_namespaces
from penstock.rollout.processes.job_process import enter_sandbox
from penstock.rollout.processes.job_protocol import JobSandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
WHY_NOT = why_no_namespaces() if sys.platform == "linux" else "Linux only"
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=f"namespaces: {WHY_NOT}")


def confined(look: Callable[..., Any], sandbox: JobSandbox, artifacts: Path, *arguments: str | int) -> Any:
    """What `look` returns in a process that has entered the sandbox."""
    job = json.dumps([look.__name__, asdict(sandbox), str(artifacts), arguments])
    done = subprocess.run([sys.executable, __file__, job], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def content(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return type(error).__name__


def shell(script: str) -> str:
    return subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False).stdout


def at_hidden_files(run: str, label: str) -> Any:
    Path(run, "scratch/made").write_text("here")
    uncover = shell(f"umount {run}; unshare -rm umount {run}; umount {label}; cat {run}/pool.db {label}")
    return [content(f"{run}/pool.db"), content(label), uncover, [path.name for path in Path(run).iterdir()], os.geteuid()]


@needs_namespaces
def test_confined_process_and_what_it_starts_see_no_hidden_file(tmp_path: Path) -> None:
    run, scratch, label = tmp_path / "run", tmp_path / "run" / "scratch", tmp_path / "tasks.jsonl"
    scratch.mkdir(parents=True)
    (run / "pool.db").write_text("labels")
    label.write_text("the label")
    sandbox = JobSandbox(name="namespaces", hidden=(str(run), str(label)))
    found = confined(at_hidden_files, sandbox, scratch, str(run), str(label))
    assert found == ["FileNotFoundError", "", "", ["scratch"], os.geteuid()]
    assert (scratch / "made").read_text() == "here"


def at_others(grader: str, victim: int) -> Any:
    shell(f"echo forged > {grader}; mount -o remount,rw {grader}; rm -f {grader}")
    return [content(f"/proc/{pid}/environ") for pid in (victim, os.getppid())]


@needs_namespaces
def test_confined_process_cannot_change_files_or_read_processes(tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("the grader")
    victim = subprocess.Popen(["sleep", "60"])
    try:
        sandbox = JobSandbox(name="namespaces", readonly=(str(grader),))
        assert confined(at_others, sandbox, tmp_path, str(grader), victim.pid) == ["PermissionError", "PermissionError"]
    finally:
        victim.kill()
        victim.wait()
    assert grader.read_text() == "the grader"


def at_a_private_file(path: str) -> Any:
    return [os.getresuid(), os.getgroups(), content(path)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_process_with_user_id_cannot_read_private_files(tmp_path: Path) -> None:
    private = tmp_path / "pool.db"
    private.write_text("labels")
    private.chmod(0o600)
    found = confined(at_a_private_file, JobSandbox(name="user", user=54_321), tmp_path, str(private))
    assert found == [[54_321] * 3, [54_321] if found[1] else [], "PermissionError"]


if __name__ == "__main__":
    name, settings, artifacts, arguments = json.loads(sys.argv[1])
    looks = {look.__name__: look for look in (at_hidden_files, at_others, at_a_private_file)}
    enter_sandbox(
        JobSandbox(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}), artifacts
    )
    sys.stdout.write(json.dumps(looks[name](*arguments)))
