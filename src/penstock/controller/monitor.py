"""The process that stands by one run: it starts it, writes down what it says and how it ended, and takes it along when it dies.

`python -m penstock.controller.monitor RUN_FOLDER`, with the run's secrets as a JSON object on stdin. It outlives the controller.
Who finds the run's lock held, or the run over, leaves: a run never has two. What is left without an exit file is taken up again.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from penstock.controller.environments import prepare_environment
from penstock.controller.jobs import ExitRecord, RunJob, process_environment
from penstock.controller.runlog import LineDecoder, RunLog, SecretRedactor
from penstock.controller.runs import RunFiles
from penstock.errors import ConfigError
from penstock.system.locks import FileLock, lock_holder
from penstock.system.process_group import how_ended

RUN_VARIABLE = "PENSTOCK_RUN"
"""Variable by which processes of a run are known: its folder."""
POLL_S = 0.5
DRAIN_S = 2.0
"""For what is still in the pipe when the process is gone; a stray that holds it open may hold it longer."""
LOCK_TIMEOUT_S = 2.0
"""A controller that looks whether the lock is held holds it for a moment."""
_PR_SET_PDEATHSIG = 1


class RunMonitor:
    """One run's process, from its start to its end."""

    def __init__(self, job: RunJob, log: RunLog, *, env: Mapping[str, str], strike: SecretRedactor) -> None:
        self._job = job
        self._log = log
        self._env = dict(env)
        self._strike = strike
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_at: float | None = None
        """When patience ends; None as long as nobody asked for an end."""

    @property
    def asked(self) -> bool:
        """Whether an end was asked for."""
        return self._kill_at is not None

    def ask(self, *_: Any) -> None:
        """Let it end safely, as Ctrl-C does. A signal handler."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._job.stop_grace_s
            self._signal(signal.SIGINT)

    def run(self) -> int:
        """The whole job; the exit code of what ended it."""
        python = self._job.argv[0]
        if self._job.project:
            kept = Path(self._job.environments)
            python = str(prepare_environment(Path(self._job.project), kept, self._install, self._log.add))
        return self.carry_out([python, *self._job.argv[1:]], self._env)

    def _install(self, argv: list[str]) -> int:
        """A command that installs: it sees where packages come from, and no secret of the run."""
        sources = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        return self.carry_out(argv, process_environment(os.environ, {RUN_VARIABLE: self._env[RUN_VARIABLE]} | sources, {}))

    def carry_out(self, argv: list[str], env: Mapping[str, str]) -> int:
        """Run one command to its end, its output to the log; its exit code, negative for a signal."""
        if self.asked:
            return -signal.SIGINT
        self._process = process = subprocess.Popen(
            argv, cwd=self._job.cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            process_group=0, preexec_fn=_parent_death_signal(os.getpid()),
        )  # fmt: skip
        with process:
            if self.asked:
                self._signal(signal.SIGINT)
            self._follow(process)
            self._process = None
            return process.wait()

    def _follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Until the process has ended and what it said is in the log; nothing of its group is left then."""
        pipe, lines, until = process.stdout, LineDecoder(self._strike), float("inf")
        assert pipe is not None
        is_open = True
        while (is_open or until == float("inf")) and time.monotonic() < until:
            if is_open and select.select([pipe], [], [], POLL_S)[0]:
                chunk = os.read(pipe.fileno(), 65536)
                is_open = bool(chunk)
                for line in lines.feed(chunk):
                    self._log.add(line)
            elif not is_open:
                time.sleep(POLL_S / 10)
            is_late = self._kill_at is not None and time.monotonic() > self._kill_at
            if is_late or not Path(self._env[RUN_VARIABLE]).exists():  # nobody could ever see what a run without its folder does
                self._signal(signal.SIGKILL)
            if until == float("inf") and _has_ended(process.pid):
                self._signal(signal.SIGKILL)  # strays of its group; its number is not given away before it is waited for
                until = time.monotonic() + DRAIN_S
        for line in lines.close():
            self._log.add(line)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


def monitor_run(files: RunFiles, secrets: Mapping[str, str]) -> None:
    """Carry out the job of a run whose lock is held, and note its end, however long the disk refuses to take it."""
    job, strike = RunJob.read(files), SecretRedactor(secrets.values())
    kill_stray_processes(files)
    log = RunLog(files.log, job.log_mb)
    env = process_environment(os.environ, job.env, secrets) | {RUN_VARIABLE: str(files.path)}
    keeper = RunMonitor(job, log, env=env, strike=strike)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, keeper.ask)
    log.add("the run is taken up again: the process before was lost" if log.resumed else "the run begins", "info")
    code = _run_job(keeper, log)
    kill_stray_processes(files)
    stopped = keeper.asked and files.stop.exists()
    over = code == 0 or stopped or not keeper.asked
    log.add(f"its process {how_ended(code)}" + ("" if over else "; the run is taken up again by a controller"), "info")
    log.close()
    if over:
        _write_exit_record(
            files, ExitRecord(code=code, stopped=stopped, message="" if stopped else _failure_message(code, log.reason))
        )


def _run_job(keeper: RunMonitor, log: RunLog) -> int:
    try:
        return keeper.run()
    except ConfigError as error:
        log.add(f"penstock: {error}")
        return 2
    except OSError as error:
        log.add(f"penstock: the run's process cannot be started: {error}")
        return 1


def _failure_message(code: int, said: str) -> str:
    """Why a run failed; empty for one that did not."""
    if code == 0 or (code > 0 and said):
        return said if code else ""
    return f"its process {how_ended(code)}" + (f", and had said: {said}" if said else "")


def _write_exit_record(files: RunFiles, ending: ExitRecord) -> None:
    """Write it down. A run whose end is not on the disk would be carried out again, so a full disk is waited for."""
    while files.path.exists():
        with suppress(OSError):
            ending.write(files)
            return
        time.sleep(POLL_S)


@contextmanager
def hold_run_lock(files: RunFiles) -> Generator[bool]:
    """Hold the run's lock, with this process's number in it; False where another keeper has it."""
    with FileLock(files.lock, mode=0o600) as lock:
        held = lock.wait(LOCK_TIMEOUT_S)
        if held:
            lock.write_holder()
        yield held


def monitor_pid(files: RunFiles) -> int | None:
    """The process that holds the run's lock; 0 where it has not said its number yet, None where nobody holds it."""
    return lock_holder(files.lock)


def kill_stray_processes(files: RunFiles) -> None:
    """Kill what is left of the run's processes, wherever they moved to. Without /proc there is no way to find them."""
    mark, deadline = f"{RUN_VARIABLE}={files.path}\0".encode(), time.monotonic() + DRAIN_S
    while (found := list(_pids_with_variable(mark))) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _pids_with_variable(mark: bytes) -> Generator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes() + b"\0":
                yield int(folder.name)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _parent_death_signal(keeper: int) -> Any:
    """What a child does before it becomes the run's process: ask the kernel to end it when its keeper ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it ended before that
            os._exit(1)

    return ask


def main() -> None:
    """Read secrets, take the lock, keep."""
    files = RunFiles(Path(sys.argv[1]).absolute())
    os.chdir(files.path)
    try:
        secrets: dict[str, str] = orjson.loads(sys.stdin.buffer.read())
    except orjson.JSONDecodeError:
        return  # the controller died before it had told all
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    with hold_run_lock(files) as held:
        if held and not files.end.exists():
            monitor_run(files, secrets)


if __name__ == "__main__":
    main()
