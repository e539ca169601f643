"""The supervisor: starts a monitor process for each queued run, oldest first, and records how runs ended."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import orjson

from penstock.errors import PenstockError
from penstock.system.files import write_file
from penstock.system.processes import module_command, spawn_detached
from penstock.train.monitoring import NOTHING_LEARNED
from penstock_controller.monitor import monitor_pid
from penstock_controller.runs import ExitRecord, Run, RunFiles, RunJob, RunQueue, RunStatus
from penstock_controller.vault import Vault

POLL_S = 0.3
"""Pause between two polls of the runs."""
KILL_DELAY_S = 10.0
"""A stopped monitor is killed this long after it should have killed its run."""
INTERRUPTED_CODE = 130
"""Exit code of `penstock` after Ctrl-C."""
MONITOR_MODULES = (b"penstock_controller.monitor", b"penstock.controller.monitor", b"penstock.controller.keeper")
"""In the command line of a monitor; the second is an older version's, whose monitors may outlive an upgrade."""
log = logging.getLogger(__name__)


class Supervisor:
    """A background task. All its state besides the queue is a cache: after a restart it is read from the runs' files."""

    def __init__(self, runs: RunQueue, vault: Vault, folder: Path, *, max_running: int, max_launches: int) -> None:
        self._runs = runs
        self._vault = vault
        self._folder = folder
        self._max_running = max_running
        self._max_launches = max_launches
        self._monitors: dict[str, int] = {}
        """Pids of monitors that this process started and has not reaped, by run id."""
        self._stop_sent: dict[str, float] = {}
        """When a monitor got SIGTERM, by run id."""
        self._logged: dict[str, str] = {}
        """The last error logged for a run, by run id, so that a repeated one is logged once."""
        self._thread = ThreadPoolExecutor(1, "supervisor")
        """A separate thread: polls must not wait for other users of the shared pool."""
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task, which also takes over the runs of an earlier controller."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="supervisor")

    async def close(self) -> None:
        """Stops the task; monitors and their runs continue."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    def wake(self) -> None:
        """Polls now. Thread-safe."""
        self._loop.call_soon_threadsafe(self._wake.set)

    def stop(self, run: Run) -> bool:
        """Requests a stop: a pending run ends at once, a running one as by Ctrl-C. False if it has ended already."""
        requested = self._runs.request_stop(run.id)
        self.wake()
        return requested

    def files(self, run: Run) -> RunFiles:
        return RunFiles(self._folder / run.id)

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            await self._loop.run_in_executor(self._thread, self._poll)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()

    def _poll(self) -> None:
        """Looks once at every run; an error with one is logged and does not affect the others."""
        self._reap()
        try:
            running = self._runs.running()
            for run in running:
                self._handle(run)
            room = self._max_running - len(self._runs.running()) if running else self._max_running
            for run in self._runs.waiting(room) if room > 0 else ():
                self._handle(run)
            self._logged.pop("", None)
        except PenstockError as error:  # from the database; the next poll may succeed
            self._log_once("", f"the queue cannot be looked after: {error}")

    def _handle(self, run: Run) -> None:
        try:
            if run.status is RunStatus.PENDING:
                self._launch(run)
            else:
                self._check(run)
            self._logged.pop(run.id, None)
        except Exception as error:
            self._log_once(run.id, f"run {run.name} ({run.id}) cannot be looked after: {type(error).__name__}: {error}")

    def _log_once(self, about: str, text: str) -> None:
        if self._logged.get(about) != text:
            self._logged[about] = text
            log.exception(text)

    def _check(self, run: Run) -> None:
        """Handles a started run: records its end, stops it, or restarts it if its monitor was lost."""
        # The lock is read before the exit file: a monitor that ends in between has written the file, and is not taken for lost.
        monitor = self._monitor(run)
        exit_record = ExitRecord.read(self.files(run))
        if exit_record is not None:
            self._finish(run, exit_record)
        elif monitor is not None:
            if run.stop_asked:
                self._stop_monitor(run, monitor)
        elif run.stop_asked:
            self._record_end(run, RunStatus.STOPPED, "stopped on request")
        elif run.launches >= self._max_launches:
            self._record_end(run, RunStatus.FAILED, f"its process was lost {run.launches} times; see its log, then submit it again")
        else:
            self._launch(run)

    def _monitor(self, run: Run) -> int | None:
        """Returns the pid of the run's monitor; None if there is none, 0 if it is not known yet."""
        return self._monitors.get(run.id) or monitor_pid(self.files(run))

    def _launch(self, run: Run) -> None:
        try:
            secrets = self._vault.values(list(run.submission.secrets), person=run.submission.person)
        except PenstockError as error:
            self._record_end(run, RunStatus.FAILED, str(error))
            return
        if self._runs.launch(run.id):
            self._monitors[run.id] = start_monitor(self.files(run), secrets)

    def _finish(self, run: Run, exit_record: ExitRecord) -> None:
        if exit_record.code in (0, NOTHING_LEARNED):
            self._record_end(run, RunStatus.FINISHED, "", exit_record.ended_at)
        elif exit_record.stopped or exit_record.code == INTERRUPTED_CODE:
            self._record_end(run, RunStatus.STOPPED, "stopped on request" if run.stop_asked else "stopped", exit_record.ended_at)
        else:
            self._record_end(run, RunStatus.FAILED, exit_record.message, exit_record.ended_at)

    def _record_end(self, run: Run, status: RunStatus, message: str, ended_at: str | None = None) -> None:
        self._stop_sent.pop(run.id, None)
        self._runs.finish(run.id, status, message, ended_at=ended_at)

    def _stop_monitor(self, run: Run, monitor: int) -> None:
        """Sends SIGTERM once, and SIGKILL if the monitor is late; the kernel then kills the run, too."""
        if not monitor or not _is_monitor(monitor):
            return
        files, sent_at = self.files(run), self._stop_sent.get(run.id)
        with suppress(ProcessLookupError):
            if sent_at is None:
                with suppress(OSError):  # full disk: without it there is no exit file, but `_check` still records the stop
                    write_file(files.stop, b"")
                os.kill(monitor, signal.SIGTERM)
                self._stop_sent[run.id] = time.monotonic()
            elif time.monotonic() > sent_at + RunJob.read(files).stop_grace_s + KILL_DELAY_S:
                os.kill(monitor, signal.SIGKILL)

    def _reap(self) -> None:
        """Reaps monitors that this process started and that have ended."""
        for run_id, pid in list(self._monitors.items()):
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                del self._monitors[run_id]


def start_monitor(files: RunFiles, secrets: Mapping[str, str]) -> int:
    """Starts a monitor in its own session, so that it outlives this process; returns its pid. Secrets go through a pipe only."""
    reading, writing = os.pipe()
    try:
        command = [*module_command("penstock_controller.monitor"), str(files.path)]
        pid = spawn_detached(command, log=files.path / "keeper.err", stdin=reading)
    finally:
        os.close(reading)
    with os.fdopen(writing, "wb") as pipe, suppress(BrokenPipeError):  # the monitor found the run locked or ended, and exited
        pipe.write(orjson.dumps(dict(secrets)))
    return pid


def _is_monitor(pid: int) -> bool:
    """Whether `pid` is a monitor: the pid in a lock file may have been reused since."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return not Path("/proc").exists()
    return any(module in command for module in MONITOR_MODULES)
