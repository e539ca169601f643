"""A monitor runs one process: its output, its end, and what is killed with it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from core_cases import COUNTS, WAITS, files_of, is_gone, is_ready, lay_out, ledger, messages, until

from penstock_controller.home import Home
from penstock_controller.monitor import hold_run_lock, kill_stray_processes, monitor_pid
from penstock_controller.runlog import MAX_LINE_CHARS, LineDecoder, RunLog, SecretRedactor
from penstock_controller.runs import ExitRecord, Run, RunFiles, process_environment

STRAY = """
import subprocess
sleeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)
open('stray', 'w').write(str(sleeper.pid))
open('pid', 'w').write(str(os.getpid()))
"""
PRINTS = """
import os, json, base64, urllib.parse
key = os.environ['API_KEY']
print(key, repr(key), json.dumps(key), urllib.parse.quote(key, safe=''))
print(base64.b64encode(key.encode()).decode())
print(os.environ['PEM'])
print(os.environ['PENSTOCK_SECRETS'])
raise ValueError(key)
"""


@pytest.fixture
def home(tmp_path: Path) -> Generator[Home]:
    yield Home(tmp_path / "home")
    for folder in (tmp_path / "home" / "runs").glob("*"):
        kill_stray_processes(RunFiles(folder))


@contextmanager
def kept(home: Home, run: Run, secrets: dict[str, str] | None = None) -> "Generator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "penstock_controller.monitor", str(files_of(home, run).path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin
        process.stdin.write(json.dumps(secrets or {}).encode())
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def keep(home: Home, script: str, secrets: dict[str, str] | None = None, **job: Any) -> tuple[Run, ExitRecord]:
    run = lay_out(home, script, **job)
    with kept(home, run, secrets) as process:
        assert process.wait(60) == 0
    ending = ExitRecord.read(files_of(home, run))
    assert ending is not None
    return run, ending


def test_log_has_every_line_and_the_end(home: Home) -> None:
    run, ending = keep(home, COUNTS)
    assert (ending.code, ending.stopped, ending.message) == (0, False, "")
    assert messages(home, run) == [
        "the run begins", "first line", *(f"line {n}" for n in range(20)), "last line", "its process ended with exit code 0",
    ]  # fmt: skip


def test_failure_reason_is_the_last_error_line(home: Home) -> None:
    _, ending = keep(home, "import sys\nprint('penstock: the file is bad', file=sys.stderr)\nprint('bye')\nsys.exit(2)")
    assert (ending.code, ending.message) == (2, "penstock: the file is bad")
    _, ending = keep(home, "import os\nos.kill(os.getpid(), 9)", name="killed")
    assert ending.message == "its process was killed by SIGKILL, by the user or for want of memory"


def test_second_monitor_exits(home: Home) -> None:
    run = lay_out(home, WAITS)
    with kept(home, run) as first:
        until(is_ready(home, run))
        with kept(home, run) as second:
            assert second.wait(30) == 0
        assert first.poll() is None
        files_of(home, run).stop.touch()
        first.terminate()
        assert first.wait(30) == 0
    with kept(home, run) as third:
        assert third.wait(30) == 0
    assert ledger(home, run) == ["begin", "asked"]


def test_one_of_several_monitors_executes_the_run(home: Home) -> None:
    run = lay_out(home, COUNTS)
    with kept(home, run) as one, kept(home, run) as two, kept(home, run) as three, kept(home, run) as four:
        assert [process.wait(60) for process in (one, two, three, four)] == [0] * 4
    assert ledger(home, run) == ["begin", "end"]
    assert messages(home, run)[0] == "the run begins" and len(messages(home, run)) == 24


def test_monitor_without_all_secrets_exits(home: Home) -> None:
    run = lay_out(home, COUNTS)
    command = [sys.executable, "-m", "penstock_controller.monitor", str(files_of(home, run).path)]
    assert subprocess.run(command, input=b'{"KEY": "cut o', timeout=30, check=False).returncode == 0
    assert not files_of(home, run).end.exists() and not files_of(home, run).log.exists()


def test_stop_ends_a_run_safely_or_kills_it(home: Home) -> None:
    for name, script, code in (("safe", WAITS, 130), ("deaf", WAITS.replace("(note('asked'), sys.exit(130))", "None"), -9)):
        run = lay_out(home, script, name, stop_grace_s=0.5)
        with kept(home, run) as process:
            until(is_ready(home, run))
            files_of(home, run).stop.touch()
            process.terminate()
            assert process.wait(30) == 0
        ending = ExitRecord.read(files_of(home, run))
        assert ending and (ending.code, ending.stopped) == (code, True)


def test_run_of_a_terminated_monitor_can_resume(home: Home) -> None:
    run = lay_out(home, WAITS)
    with kept(home, run) as process:
        until(is_ready(home, run))
        process.terminate()
        assert process.wait(30) == 0
    assert ledger(home, run) == ["begin", "asked"] and not files_of(home, run).end.exists()
    assert messages(home, run)[-1].endswith("the run is taken up again by a controller")


def test_run_dies_with_monitor_and_strays_are_killed(home: Home) -> None:
    run = lay_out(home, WAITS.replace("print('ready'", STRAY + "print('ready'"))
    code = files_of(home, run).code
    with kept(home, run) as process:
        until(is_ready(home, run))
        wanderer = int((code / "stray").read_text())
        process.kill()
        process.wait()
        until(lambda: is_gone(int((code / "pid").read_text())))
        assert not is_gone(wanderer)
        (code / "main.py").write_text(COUNTS)
        with kept(home, run) as second:
            assert second.wait(30) == 0
    assert is_gone(wanderer)
    assert "the run is taken up again: the process before was lost" in messages(home, run)


def test_a_run_whose_folder_is_removed_is_ended(home: Home) -> None:
    run = lay_out(home, WAITS.replace("print('ready'", STRAY + "print('ready'"))
    with kept(home, run) as process:
        until(is_ready(home, run))
        pid = int((files_of(home, run).code / "pid").read_text())
        shutil.rmtree(files_of(home, run).path)
        assert process.wait(30) == 0
        assert is_gone(pid)


def test_secrets_reach_the_run_but_not_its_log(home: Home) -> None:
    secrets = {"API_KEY": 'pass"word/ä 1', "PEM": "-----BEGIN\nline-of-a-key-1\nline-of-a-key-2\n"}
    run, ending = keep(home, PRINTS, secrets)
    log = files_of(home, run).log.read_text()
    for form in ("pass", "word", "cGFzcyJ3b3Jk", "line-of-a-key"):
        assert form not in log
    assert "API_KEY,PEM" in log and ending.message == "ValueError: [redacted]"
    for file in files_of(home, run).path.rglob("*"):
        assert not file.is_file() or b"pass" not in file.read_bytes()


def test_a_run_sees_a_short_list_of_variables() -> None:
    outside = {"PATH": "/bin", "LC_ALL": "C", "PENSTOCK_CACHE": "/c", "PENSTOCK_CONTROLLER_TOKEN": "t", "AWS_SECRET": "s"}
    found = process_environment(outside, {"MODE": "fast", "PENSTOCK_SECRETS": "NONE"}, {"KEY": "v"})
    kept = {"PATH": "/bin", "LC_ALL": "C", "PENSTOCK_CACHE": "/c"}
    assert found == kept | {"MODE": "fast", "KEY": "v", "PYTHONUNBUFFERED": "1", "PENSTOCK_SECRETS": "KEY"}


def test_log_lines_are_cut_and_cleaned() -> None:
    lines = LineDecoder(SecretRedactor(["topsecret"]))
    assert list(lines.feed(b"10%\r20%\r30%\r\n\x1b[31mred\x1b[0m top")) == ["30%"]
    assert list(lines.feed(b"secret\n" + b"x" * 400_000)) == [
        "red [redacted]",
        "x" * MAX_LINE_CHARS + " … (a longer line; the rest is left out)",
    ]
    assert list(lines.feed(b"yyy\nnext")) == []
    assert list(lines.close()) == ["next"]
    bar = LineDecoder(SecretRedactor([]))
    for n in range(100_000):
        assert list(bar.feed(b"\r%5d of it" % n)) == []
    assert list(bar.close()) == ["99999 of it"]
    [cut] = LineDecoder(SecretRedactor(["topsecret"])).feed(b"a" * (MAX_LINE_CHARS - 3) + b"topsecret\n")
    assert cut.startswith("a" * (MAX_LINE_CHARS - 3) + "[re")


def test_log_is_repaired_and_bounded_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"message": "whole"}\n{"message": "to' + b"o" * 100_000)
    log = RunLog(path, 0.001)
    for n in range(20):
        log.add(f"line {n}")
    log.close()
    found = [json.loads(line)["message"] for line in path.read_bytes().splitlines()]
    assert found[:2] == ["whole", "line 0"] and found[-1] == "the log is full (0.001 MB); what is said from here on is left out"
    assert len(found) < 15


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_and_not_the_run(home: Home) -> None:
    run = lay_out(home, COUNTS)
    files_of(home, run).log.symlink_to("/dev/full")
    with kept(home, run) as process:
        assert process.wait(60) == 0
    ending = ExitRecord.read(files_of(home, run))
    assert ending and ending.code == 0 and ledger(home, run) == ["begin", "end"]


def test_lock_names_its_holder(home: Home) -> None:
    files = files_of(home, lay_out(home, COUNTS))
    assert monitor_pid(files) is None
    with hold_run_lock(files) as held:
        assert held and monitor_pid(files) == os.getpid()
    assert monitor_pid(files) is None


def test_what_cannot_be_started_is_a_failed_run(home: Home) -> None:
    _, ending = keep(home, COUNTS, argv=["/nowhere/python"])
    assert ending.code == 1 and "cannot be started" in ending.message
