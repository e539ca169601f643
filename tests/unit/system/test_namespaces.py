"""A process that confines itself: tried in a forked child, which reports what it could still do."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout.processes.fork_server import why_no_namespaces
from penstock.rollout.processes.job_process import enter_sandbox
from penstock.rollout.processes.job_protocol import JobSandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
WHY_NOT = why_no_namespaces() if sys.platform == "linux" else "Linux only"
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=f"namespaces: {WHY_NOT}")


def in_child(sandbox: JobSandbox, artifacts: Path, look: Callable[[], Any]) -> Any:
    """What `look` returns in a forked process that has entered the sandbox."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            enter_sandbox(sandbox, str(artifacts))
            os.write(writing, json.dumps(look()).encode())
        except BaseException as error:
            os.write(writing, json.dumps(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return json.loads(answer.read())


def content(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        return type(error).__name__


def shell(script: str) -> str:
    return subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False).stdout


@needs_namespaces
def test_a_confined_process_and_what_it_starts_see_no_hidden_file(tmp_path: Path) -> None:
    run, scratch, label = tmp_path / "run", tmp_path / "run" / "scratch", tmp_path / "tasks.jsonl"
    scratch.mkdir(parents=True)
    (run / "pool.db").write_text("labels")
    label.write_text("the label")
    sandbox = JobSandbox(name="namespaces", hidden=(str(run), str(label)))

    def look() -> Any:
        (scratch / "made").write_text("here")
        uncover = shell(f"umount {run}; unshare -rm umount {run}; umount {label}; cat {run}/pool.db {label}")
        return [content(run / "pool.db"), content(label), uncover, [path.name for path in run.iterdir()], os.geteuid()]

    assert in_child(sandbox, scratch, look) == ["FileNotFoundError", "", "", ["scratch"], os.geteuid()]
    assert (scratch / "made").read_text() == "here"


@needs_namespaces
def test_a_confined_process_changes_no_readonly_file_and_reads_no_other_process(tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("the grader")
    victim = subprocess.Popen(["sleep", "60"])
    try:

        def look() -> Any:
            shell(f"echo forged > {grader}; mount -o remount,rw {grader}; rm -f {grader}")
            return [content(Path(f"/proc/{pid}/environ")) for pid in (victim.pid, os.getppid())]

        sandbox = JobSandbox(name="namespaces", readonly=(str(grader),))
        assert in_child(sandbox, tmp_path, look) == ["PermissionError", "PermissionError"]
    finally:
        victim.kill()
        victim.wait()
    assert grader.read_text() == "the grader"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_with_a_user_id_of_its_own_cannot_read_private_files(tmp_path: Path) -> None:
    private = tmp_path / "pool.db"
    private.write_text("labels")
    private.chmod(0o600)
    found = in_child(JobSandbox(name="user", user=54_321), tmp_path, lambda: [os.getresuid(), os.getgroups(), content(private)])
    assert found == [[54_321] * 3, [54_321] if found[1] else [], "PermissionError"]
