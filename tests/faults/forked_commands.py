"""Runs penstock commands in forked children of one process that has imported everything: a command costs no start-up.

python forked_commands.py, then one JSON object per line on stdin: {"arguments", "cwd", "timeout_s", "kill_s", "kill_line", "log"}.
Each is answered with a line: {"code", "out", "err", "seconds"}. A child is killed after `kill_s`, or once the event log of its run,
`log`, has `kill_line` lines; its code is then -9. It is None for a child that hung. File modes hold for children of root too.
"""

import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

MODULES = (
    "openai.resources.chat", "openai.resources.responses", "scripted", "httptools", "truststore", "uvicorn", "torch._dynamo",
    "penstock.cli.app", "penstock.view.eval_view", "penstock.view.live", "penstock.evals.run", "penstock.gateway.dialects.messages",
    "penstock.gateway.dialects.responses", "penstock.http.server", "penstock.pool.sqlite", "penstock.view.export",
    "penstock.rollout.executors.inline", "penstock.train.advantages.grpo", "penstock.train.losses.clip", "penstock.train.trainer",
    "penstock.train.verify", "penstock.run.inputs",
)  # fmt: skip
"""Imported once, for all children. Nothing is computed here, so that no thread exists when they are forked."""
SCRIPTS = Path(__file__).parent / "killed_run"
KILLED = -signal.SIGKILL


class Answer(NamedTuple):
    code: int | None
    out: str
    err: str
    seconds: float


class Commands:
    """The process that runs commands, from outside."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(
        self,
        cwd: Path,
        arguments: list[str],
        *,
        timeout_s: float = 60.0,
        kill_s: float | None = None,
        kill_line: int | None = None,
        log: str = "runs/run/events.jsonl",
    ) -> Answer:
        request = {"arguments": arguments, "cwd": str(cwd), "timeout_s": timeout_s}
        request |= {"kill_s": kill_s, "kill_line": kill_line, "log": log}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Answer(**json.loads(self._process.stdout.readline()))


@contextmanager
def open_commands() -> Generator[Commands]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Commands(process)
        assert process.stdin is not None
        process.stdin.close()


def run_child(request: dict[str, Any], out: int, err: int) -> None:
    """In the child: become that command."""
    from penstock.cli.app import run

    os.setsid()
    os.chdir(request["cwd"])
    drop_capabilities()
    os.dup2(out, 1)
    os.dup2(err, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        code = run(request["arguments"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Capabilities(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint32 * 2), ("second", ctypes.c_uint32 * 6))


def drop_capabilities() -> None:
    """From here on file modes hold for root too, as for any owner of a file."""
    given = _Capabilities(first=(0x20080522, 0))  # the version of the call; all sets are empty
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(ctypes.byref(given), ctypes.byref(given, 8)):
        raise OSError(ctypes.get_errno(), "capset")


def wait(pid: int, seconds: float) -> int | None:
    """The exit code of a child, or None once the time is over."""
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(descriptor)


def wait_lines(pid: int, log: Path, lines: int) -> int | None:
    """The exit code of a child, or None once the event log of its run has so many lines."""
    while not log.exists() or log.read_bytes().count(b"\n") < lines:
        if (code := wait(pid, 0.002)) is not None:
            return code
    return None


def serve(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            run_child(request, out.fileno(), err.fileno())
        kill_s, kill_line = request["kill_s"], request["kill_line"]
        log = Path(request["cwd"], request["log"])
        code = wait_lines(pid, log, kill_line) if kill_line else wait(pid, kill_s or request["timeout_s"])
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            killed = wait(pid, 30)
            code = killed if kill_s or kill_line else None
        seconds = time.monotonic() - started
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return {"code": code, "out": texts[0], "err": texts[1], "seconds": seconds}


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(serve(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
