"""`make test` ends, with a failure, although a worker dies or is stuck: pytest runs here with the options of the Makefile."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 120
"""A dead worker ends the run within 15 seconds, 10 of them for the others to end; the rest is for a loaded machine."""
DIES = "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_after(): pass"
WAITS = "import time\ndef test_waits(): time.sleep(600)"
HOLDS_ON = "import threading\ndef test_leaves_a_thread(): threading.Thread(target=threading.Event().wait).start()"
STUCK = """
import ctypes, pytest
@pytest.mark.timeout(1)
def test_is_stuck():
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)
"""


def make_test(folder: Path, files: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    """Run `files` as `make test` would run them, if they were the tests."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    shutil.copy(REPOSITORY / "tests" / "conftest.py", folder)
    options = re.search(r"^TEST_OPTIONS := (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert options
    command = [sys.executable, "-m", "pytest", "-c", str(REPOSITORY / "pyproject.toml"), "--rootdir", str(folder)]
    command += [*shlex.split(options[1]), *more, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_dead_worker_ends_run_and_its_test_is_named(tmp_path):
    done = make_test(tmp_path, {"a": DIES, "b": WAITS, "c": WAITS, "d": WAITS})
    assert done.returncode == 1
    assert re.search(r"worker gw\d died .* in test_a\.py::test_dies", done.stdout)


@pytest.mark.soak
def test_a_worker_stuck_in_c_code_ends_the_run(tmp_path):
    done = make_test(tmp_path, {"a": STUCK, "b": WAITS, "c": WAITS}, "-o", "faulthandler_timeout=3")
    assert done.returncode == 1
    assert "test_a.py::test_is_stuck" in done.stdout


@pytest.mark.soak
def test_thread_that_never_ends_does_not_keep_run_from_end(tmp_path):
    done = make_test(tmp_path, {"a": HOLDS_ON, "b": "def test_b(): pass"})
    assert (done.returncode, "2 passed" in done.stdout) == (0, True)
