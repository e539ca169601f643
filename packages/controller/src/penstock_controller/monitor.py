"""The monitor process of one run: starts the run's process, logs its output, and records how it ended.

Usage: `python -m penstock_controller.monitor RUN_FOLDER`, with the run's secrets as a JSON object on stdin. A monitor outlives the
controller; the run's process dies with its monitor. A monitor that finds the run locked or ended exits at once, so a run never has
two. A run without an exit file is started again.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import ConfigError
from penstock.system.files import FileLock, lock_holder
from penstock.system.processes import describe_exit, die_with_parent, protect_memory, signal_group
from penstock_controller.environments import prepare_environment
from penstock_controller.isolation import RunIsolation, choose_isolation, describe_isolation, is_checkpoint
from penstock_controller.runlog import LineDecoder, RunLog, SecretRedactor
from penstock_controller.runs import ExitRecord, RunFiles, RunJob, process_environment

RUN_VARIABLE = "PENSTOCK_RUN"
"""Environment variable that marks a run's processes; its value is the run's folder."""
POLL_S = 0.5
DRAIN_S = 2.0
"""How long the pipe is read after the process has ended; a stray child may hold it open longer."""
LOCK_TIMEOUT_S = 2.0
"""A controller that tests the lock holds it for a moment, so one failed attempt means nothing."""


class RunMonitor:
    """Starts one run's process and follows it to its end."""

    def __init__(self, job: RunJob, files: RunFiles, log: RunLog, *, env: Mapping[str, str], redact: SecretRedactor) -> None:
        self._job = job
        self._files = files
        self._log = log
        self._env = dict(env)
        self._redact = redact
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_at: float | None = None
        """When the process is killed; None until a stop is requested."""

    @property
    def stop_requested(self) -> bool:
        return self._kill_at is not None

    def request_stop(self, *_: Any) -> None:
        """Interrupts the process, as Ctrl-C does, and sets the time of SIGKILL. A signal handler."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._job.stop_grace_s
            self._signal(signal.SIGINT)

    def run(self) -> int:
        """Prepares the environment if needed and runs the job; returns the exit code of the last command."""
        isolation = job_isolation(self._job, self._files)
        if not (isolation.sandbox.isolates or isolation.trusted):
            self._log.add(describe_isolation(isolation.sandbox), "info")
        python = Path(self._job.argv[0])
        if self._job.project:

            def install(argv: list[str], environment: Path) -> int:
                """Runs an install command: it sees pip's settings, but no secret of the run."""
                sources = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
                env = process_environment(os.environ, {RUN_VARIABLE: self._env[RUN_VARIABLE]} | sources, {})
                return self.run_command(argv, env, replace(isolation, writable=(environment,)))

            python = prepare_environment(Path(self._job.project), Path(self._job.environments), install, self._log.add)
            isolation = replace(isolation, readonly=(*isolation.readonly, python.parents[1]))
        return self.run_command([str(python), *self._job.argv[1:]], self._env, isolation)

    def run_command(self, argv: list[str], env: Mapping[str, str], isolation: RunIsolation) -> int:
        """Runs one command with its output in the log; returns the exit code, negative for a signal."""
        if self.stop_requested:
            return -signal.SIGINT
        self._process = process = subprocess.Popen(
            isolation.command(argv), cwd=self._job.cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, process_group=0, preexec_fn=die_with_parent(),
        )  # fmt: skip
        with process:
            if self.stop_requested:  # the signal came between the check above and the assignment of `_process`
                self._signal(signal.SIGINT)
            self._follow(process)
            self._process = None
            return isolation.sandbox.exit_code(process.wait())

    def _follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Copies output to the log until the process has ended; kills what is left of its process group."""
        pipe, lines, until = process.stdout, LineDecoder(self._redact), float("inf")
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
            if is_late or not Path(self._env[RUN_VARIABLE]).exists():  # the folder was deleted: the results would be lost anyway
                self._signal(signal.SIGKILL)
            if until == float("inf") and _has_ended(process.pid):
                self._signal(signal.SIGKILL)  # the rest of its group; its pid is not reused before it is reaped
                until = time.monotonic() + DRAIN_S
        for line in lines.close():
            self._log.add(line)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            signal_group(self._process.pid, number)


def job_isolation(job: RunJob, files: RunFiles) -> RunIsolation:
    """Returns how the job's code is started: it changes its code and output, and reads its config, tasks and first weights."""
    files.out.mkdir(exist_ok=True)
    runs, first = files.path.parent, Path(job.checkpoint)
    return RunIsolation(
        sandbox=choose_isolation(job.sandbox),
        home=runs.parent,
        trusted=job.trusted,
        readonly=(files.config, files.tasks, *([first] if is_checkpoint(first, runs) else [])),
        writable=(files.code, files.out),
    )


def monitor_run(files: RunFiles, secrets: Mapping[str, str]) -> None:
    """Runs the job of a run whose lock this process holds, and records its end."""
    job, redact = RunJob.read(files), SecretRedactor(secrets.values())
    kill_stray_processes(files)
    log = RunLog(files.log, job.log_mb)
    env = process_environment(os.environ, job.env, secrets) | {RUN_VARIABLE: str(files.path)}
    monitor = RunMonitor(job, files, log, env=env, redact=redact)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, monitor.request_stop)
    log.add("the run is taken up again: the process before was lost" if log.resumed else "the run begins", "info")
    code = _run_job(monitor, log)
    kill_stray_processes(files)
    stopped = monitor.stop_requested and files.stop.exists()
    # a signal without the stop file came from outside (a shutdown): without an exit file a controller starts the run again
    ended = code == 0 or stopped or not monitor.stop_requested
    log.add(f"its process {describe_exit(code)}" + ("" if ended else "; the run is taken up again by a controller"), "info")
    log.close()
    if ended:
        message = "" if stopped else _failure_message(code, log.reason)
        _write_exit_record(files, ExitRecord(code=code, stopped=stopped, message=message))


def _run_job(monitor: RunMonitor, log: RunLog) -> int:
    try:
        return monitor.run()
    except ConfigError as error:
        log.add(f"penstock: {error}")
        return 2
    except OSError as error:
        log.add(f"penstock: the run's process cannot be started: {error}")
        return 1


def _failure_message(code: int, last_line: str) -> str:
    """Returns why a run failed; empty if it succeeded."""
    if code == 0 or (code > 0 and last_line):
        return last_line if code else ""
    return f"its process {describe_exit(code)}" + (f", and had said: {last_line}" if last_line else "")


def _write_exit_record(files: RunFiles, ending: ExitRecord) -> None:
    """Writes exit.json; retries while the disk is full, since a run without it would be executed again."""
    while files.path.exists():
        with suppress(OSError):
            ending.write(files)
            return
        time.sleep(POLL_S)


@contextmanager
def hold_run_lock(files: RunFiles) -> Generator[bool]:
    """Holds the run's lock, with this process's pid in the file; yields False if another monitor has it."""
    with FileLock(files.lock, mode=0o600) as lock:
        locked = lock.wait(LOCK_TIMEOUT_S)
        if locked:
            lock.write_holder()
        yield locked


def monitor_pid(files: RunFiles) -> int | None:
    """Returns the pid of the monitor that holds the run's lock; 0 if it is not written yet, None if the lock is free."""
    return lock_holder(files.lock)


def kill_stray_processes(files: RunFiles) -> None:
    """Kills processes that carry the run's variable, also those that left its process group. Needs /proc."""
    mark, deadline = f"{RUN_VARIABLE}={files.path}\0".encode(), time.monotonic() + DRAIN_S
    while (found := list(_pids_with_variable(mark))) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _pids_with_variable(mark: bytes) -> Generator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes() + b"\0":
                yield int(folder.name)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def main() -> None:
    protect_memory()  # it has the run's secrets, and the controller's environment
    files = RunFiles(Path(sys.argv[1]).absolute())
    os.chdir(files.path)
    try:
        secrets: dict[str, str] = orjson.loads(sys.stdin.buffer.read())
    except orjson.JSONDecodeError:
        return  # the controller died before it had sent all of it
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    with hold_run_lock(files) as locked:
        if locked and not files.end.exists():
            monitor_run(files, secrets)


if __name__ == "__main__":
    main()
