"""Programs in a sandbox: what they see, and that they are ended and report as without one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.system.sandbox import Sandbox, SandboxName, choose_sandbox

NAMES: tuple[SandboxName, ...] = ("bubblewrap", "user")
CHOSEN = {name: choose_sandbox("auto", auto=(name,)) for name in NAMES}
OTHER_USER = 54_321


@pytest.fixture(params=NAMES)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    chosen = CHOSEN[request.param]
    if not chosen.isolates:
        pytest.skip(chosen.reason)
    return chosen


def run(sandbox: Sandbox, script: str, **paths: list[Path]) -> subprocess.CompletedProcess[str]:
    command = sandbox.command(["/bin/sh", "-c", script], **paths)
    done = subprocess.run(command.argv, capture_output=True, text=True, start_new_session=True, timeout=60, **command.options)
    return subprocess.CompletedProcess(done.args, sandbox.exit_code(done.returncode), done.stdout, done.stderr)


def start(sandbox: Sandbox, script: str) -> subprocess.Popen[str]:
    command = sandbox.command(["/bin/sh", "-c", script])
    return subprocess.Popen(command.argv, stdout=subprocess.PIPE, text=True, start_new_session=True, **command.options)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    (folder / "key").write_text("the key")
    return folder


def test_hidden_folders_cannot_be_read_nor_uncovered(sandbox: Sandbox, private: Path) -> None:
    script = f"cat {private}/key; umount {private}; unshare -rm umount {private}; cat {private}/key; true"
    assert run(sandbox, script, hidden=[private]).stdout == ""


def test_a_hidden_file_cannot_be_opened(private: Path) -> None:
    if not CHOSEN["bubblewrap"].isolates:
        pytest.skip(CHOSEN["bubblewrap"].reason)
    done = run(CHOSEN["bubblewrap"], f"ls {private}; cat {private}/key", hidden=[private / "key", private / "missing"])
    assert (done.stdout, done.returncode) == ("key\n", 1)


def test_a_writable_folder_may_be_inside_a_hidden_one(private: Path) -> None:
    if not CHOSEN["bubblewrap"].isolates:
        pytest.skip(CHOSEN["bubblewrap"].reason)
    scratch, fixed = private / "scratch", private / "grader.py"
    scratch.mkdir()
    fixed.write_text("grade")
    script = f"ls {private}; cd {scratch} && echo made > file; echo forged > {fixed}; true"
    assert (
        run(CHOSEN["bubblewrap"], script, hidden=[private], writable=[scratch], readonly=[fixed]).stdout == "grader.py\nscratch\n"
    )
    assert (scratch / "file").read_text() == "made\n"
    assert fixed.read_text() == "grade"


def test_a_writable_folder_is_given_to_the_user(tmp_path: Path) -> None:
    if not CHOSEN["user"].isolates:
        pytest.skip(CHOSEN["user"].reason)
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(0o711)
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    assert run(CHOSEN["user"], f"echo made > {scratch}/file", writable=[scratch]).returncode == 0
    assert (scratch / "file").stat().st_uid != 0


def test_the_parent_cannot_be_read(sandbox: Sandbox) -> None:
    pid = os.getpid()
    done = run(sandbox, f"cat /proc/{pid}/environ /proc/{pid}/root/etc/passwd; head -c 1 /proc/{pid}/mem; true")
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["bubblewrap", "user", "off"])
def test_exit_codes_and_signals_are_the_programs_own(name: SandboxName) -> None:
    sandbox = Sandbox(name="off") if name == "off" else CHOSEN[name]
    assert run(sandbox, "exit 7").returncode == 7
    assert run(sandbox, "kill -SEGV $$").returncode == -signal.SIGSEGV


def test_sigterm_to_the_group_lets_the_program_clean_up(sandbox: Sandbox) -> None:
    process = start(sandbox, 'trap "echo cleaned; exit 3" TERM; echo up; while :; do sleep 0.01; done')
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.read() == "cleaned\n"
    assert process.returncode == 3


def test_killing_the_group_leaves_nothing(sandbox: Sandbox) -> None:
    process = start(sandbox, "sleep 600 & echo up; wait")
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""  # closed: whoever held it is gone


def test_reason_is_reported_where_nothing_isolates(private: Path) -> None:
    refused = choose_sandbox("auto", auto=("user",), needs=[private / "key"])
    assert not refused.isolates
    assert ("key" if os.geteuid() == 0 else "it needs root") in refused.reason
    with pytest.raises(ConfigError, match="user"):
        choose_sandbox("user", needs=[private / "key"])
    assert choose_sandbox("off").reason


def test_files_that_others_may_read_are_exposed(private: Path) -> None:
    assert Sandbox(name="user").exposed([private, private / "key", private / "missing"]) == []
    assert Sandbox(name="user").exposed([Path("/etc/passwd")]) == [Path("/etc/passwd")]
    assert Sandbox(name="off").exposed([private]) == [private]
    assert Sandbox(name="bubblewrap").exposed([Path("/etc/passwd")]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("protected", [True, False])
def test_a_protected_process_cannot_be_read_by_its_own_user(protected: bool) -> None:
    code = f"""import ctypes, os
from penstock.system.processes import PR_SET_DUMPABLE, protect_memory
if os.geteuid() == 0:
    os.setuid({OTHER_USER})
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # which a change of the user takes away
if {protected}:
    protect_memory()
print(flush=True)
input()"""
    user = OTHER_USER if os.geteuid() == 0 else None
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        read = subprocess.run(["cat", f"/proc/{process.pid}/environ"], capture_output=True, check=False, user=user)
        process.stdin.write("\n")
    assert (read.returncode == 0) is not protected
    assert bool(read.stdout) is not protected
