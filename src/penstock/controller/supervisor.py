"""From the queue to processes and back: starts keepers, oldest run first, and notes how runs ended, its own and those it found."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import orjson

from penstock.controller.jobs import ExitRecord, RunJob
from penstock.controller.monitor import monitor_pid
from penstock.controller.runs import Run, RunFiles, RunQueue, RunStatus
from penstock.controller.vault import Vault
from penstock.errors import PenstockError
from penstock.system.files import write_file

POLL_S = 0.3
"""Between two looks at the runs."""
KILL_DELAY_S = 10.0
"""Given to a keeper beyond what it gives to its run, before it is killed."""
INTERRUPTED_CODE = 130
log = logging.getLogger(__name__)


class Supervisor:
    """A task that looks after all runs. What it knows besides the queue can be lost: the run's files tell it again."""

    def __init__(self, runs: RunQueue, vault: Vault, folder: Path, *, at_once: int, launches: int) -> None:
        self._runs = runs
        self._vault = vault
        self._folder = folder
        self._at_once = at_once
        self._launches = launches
        self._keepers: dict[str, int] = {}
        """Processes that this supervisor started and has not waited for, by run."""
        self._asked: dict[str, float] = {}
        """When a keeper was told to end, by run."""
        self._told: dict[str, str] = {}
        """What was last told of a run that cannot be looked after, so that it is told once."""
        self._thread = ThreadPoolExecutor(1, "supervisor")
        """Its own: looks must not wait for whatever else is done in threads."""
        self._bell = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, with the runs that an earlier controller left."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._look_on(), name="supervisor")

    async def close(self) -> None:
        """Look no more; keepers and their runs go on."""
        self._closing = True
        self._bell.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    def wake(self) -> None:
        """Look now: a run was queued or asked to stop. From any thread."""
        self._loop.call_soon_threadsafe(self._bell.set)

    def stop(self, run: Run) -> bool:
        """Let it end: at once where it waits, else as Ctrl-C would. False where it was over before."""
        asked = self._runs.ask_stop(run.id)
        self.wake()
        return asked

    def files(self, run: Run) -> RunFiles:
        return RunFiles(self._folder / run.id)

    async def _look_on(self) -> None:
        while not self._closing:
            self._bell.clear()
            await self._loop.run_in_executor(self._thread, self._look)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._bell.wait()

    def _look(self) -> None:
        """Once over all runs; what goes wrong with one is told and leaves the others alone."""
        self._reap()
        try:
            running = self._runs.running()
            for run in running:
                self._guarded(run)
            room = self._at_once - len(self._runs.running()) if running else self._at_once
            for run in self._runs.waiting(room) if room > 0 else ():
                self._guarded(run)
            self._told.pop("", None)
        except PenstockError as error:  # the database: the next look may find it well again
            self._tell("", f"the queue cannot be looked after: {error}")

    def _guarded(self, run: Run) -> None:
        try:
            if run.status is RunStatus.PENDING:
                self._launch(run)
            else:
                self._attend(run)
            self._told.pop(run.id, None)
        except Exception as error:
            self._tell(run.id, f"run {run.name} ({run.id}) cannot be looked after: {type(error).__name__}: {error}")

    def _tell(self, about: str, text: str) -> None:
        if self._told.get(about) != text:
            self._told[about] = text
            log.exception(text)

    def _attend(self, run: Run) -> None:
        """A run that a process was started for: is it over, alive, or lost?"""
        keeper = self._keeper(run)  # before the exit file: a keeper that is gone has written it
        ending = ExitRecord.read(self.files(run))
        if ending is not None:
            self._finish(run, ending)
        elif keeper is not None:
            if run.stop_asked:
                self._press(run, keeper)
        elif run.stop_asked:
            self._over(run, RunStatus.STOPPED, "stopped on request")
        elif run.launches >= self._launches:
            self._over(run, RunStatus.FAILED, f"its process was lost {run.launches} times; see its log, then submit it again")
        else:
            self._launch(run)

    def _keeper(self, run: Run) -> int | None:
        """The process that stands by the run; None where there is none, 0 where it is not known yet."""
        return self._keepers.get(run.id) or monitor_pid(self.files(run))

    def _launch(self, run: Run) -> None:
        try:
            secrets = self._vault.values(list(run.submission.secrets))
        except PenstockError as error:
            self._over(run, RunStatus.FAILED, str(error))
            return
        if self._runs.launch(run.id):
            self._keepers[run.id] = start_monitor(self.files(run), secrets)

    def _finish(self, run: Run, ending: ExitRecord) -> None:
        if ending.code == 0:
            self._over(run, RunStatus.FINISHED, "", ending.ended_at)
        elif ending.stopped or ending.code == INTERRUPTED_CODE:
            self._over(run, RunStatus.STOPPED, "stopped on request" if run.stop_asked else "stopped", ending.ended_at)
        else:
            self._over(run, RunStatus.FAILED, ending.message, ending.ended_at)

    def _over(self, run: Run, status: RunStatus, message: str, ended_at: str | None = None) -> None:
        self._asked.pop(run.id, None)
        self._runs.finish(run.id, status, message, ended_at=ended_at)

    def _press(self, run: Run, keeper: int) -> None:
        """Tell the keeper to end; kill it where it does not, which takes its run along."""
        if not keeper or not _is_monitor(keeper):
            return
        files, asked = self.files(run), self._asked.get(run.id)
        with suppress(ProcessLookupError):
            if asked is None:
                with suppress(OSError):  # on a full disk the run is left without an exit file, and is over all the same
                    write_file(files.stop, b"")
                os.kill(keeper, signal.SIGTERM)
                self._asked[run.id] = time.monotonic()
            elif time.monotonic() > asked + RunJob.read(files).stop_grace_s + KILL_DELAY_S:
                os.kill(keeper, signal.SIGKILL)

    def _reap(self) -> None:
        """Wait for keepers of our own that have ended, so that nothing of them is left."""
        for run_id, pid in list(self._keepers.items()):
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                del self._keepers[run_id]


def start_monitor(files: RunFiles, secrets: Mapping[str, str]) -> int:
    """A process of its own session that outlives this one; secrets reach it through a pipe, and through nothing else."""
    reading, writing = os.pipe()
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "penstock.controller.monitor", str(files.path)],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, reading, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(files.path / "keeper.err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            ],
            setsid=True,
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],  # whatever this process ignores
            setsigmask=[],
        )
    finally:
        os.close(reading)
    with os.fdopen(writing, "wb") as pipe, suppress(BrokenPipeError):  # one that found the run kept or over has left
        pipe.write(orjson.dumps(dict(secrets)))
    return pid


def _is_monitor(pid: int) -> bool:
    """Whether that is the process that a lock file means; its number may have been given to another since."""
    try:
        return b"penstock.controller.monitor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return not Path("/proc").exists()
