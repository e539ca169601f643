"""The supervisor carries out what is queued, finds what others left, and stops what it is asked to."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest
from core_cases import (
    COUNTS,
    WAITS,
    files_of,
    is_gone,
    is_ready,
    lay_out,
    ledger,
    messages,
    monitor_of,
    until,
    until_async,
)

from penstock.errors import ControllerError
from penstock_controller.context import Controller, ControllerLimits, open_controller
from penstock_controller.database import ControllerDatabase
from penstock_controller.home import Home
from penstock_controller.identity import THE_OWNER
from penstock_controller.monitor import kill_stray_processes
from penstock_controller.runs import Run, RunFiles, RunQueue, RunStatus

ONCE = """
import os, time
if os.path.exists('again'):
    print('done')
else:
    open('again', 'w').close()
    print('ready', flush=True)
    time.sleep(300)
"""


@pytest.fixture
def home(tmp_path: Path) -> Generator[Home]:
    yield Home(tmp_path / "home")
    for folder in (tmp_path / "home" / "runs").glob("*"):
        kill_stray_processes(RunFiles(folder))


def status(controller: Controller, run: Run) -> RunStatus:
    return controller.runs.get(run.kind, run.id).status


async def over(controller: Controller, *runs: Run) -> list[Run]:
    await until_async(lambda: all(status(controller, run).is_final for run in runs), "the end")
    return [controller.runs.get(run.kind, run.id) for run in runs]


def test_queue_runs_oldest_first_up_to_the_limit(home: Home) -> None:
    order = "import pathlib\nwith open('../../order', 'a') as file: file.write('{0} ')\n"
    runs = [lay_out(home, order.format(n), f"run-{n}") for n in range(4)]

    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=1)) as controller:
            ended = await over(controller, *runs)
        assert [run.status for run in ended] == [RunStatus.FINISHED] * 4
        assert all(run.started_at and run.ended_at and run.launches == 1 for run in ended)

    asyncio.run(work())
    assert (home.runs / "order").read_text() == "0 1 2 3 "


def test_ends_of_runs_have_reasons(home: Home) -> None:
    bad = lay_out(home, "raise ValueError('no such thing')", "bad")
    halted = lay_out(home, "import sys; sys.exit(130)", "halted")

    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=2)) as controller:
            ended = await over(controller, bad, halted)
        assert [(run.status, run.message) for run in ended] == [("failed", "ValueError: no such thing"), ("stopped", "stopped")]

    asyncio.run(work())


def test_run_outlives_its_controller(home: Home) -> None:
    run, quick = lay_out(home, WAITS), lay_out(home, COUNTS, "quick")

    async def first() -> int:
        async with open_controller(home, ControllerLimits(runs=2)) as controller:
            await until_async(is_ready(home, run))
            assert status(controller, run) is RunStatus.RUNNING
            return monitor_of(home, run)

    async def second(pid: int) -> None:
        async with open_controller(home, ControllerLimits(runs=2)) as controller:
            assert monitor_of(home, run) == pid
            assert controller.supervisor.stop(controller.runs.get("eval", run.id))
            ended = await over(controller, run, quick)
            assert [each.status for each in ended] == [RunStatus.STOPPED, RunStatus.FINISHED]
            assert ended[0].launches == 1 and ended[0].message == "stopped on request"

    asyncio.run(second(asyncio.run(first())))
    assert ledger(home, run) == ["begin", "asked"] and ledger(home, quick) == ["begin", "end"]


def test_a_monitor_of_an_older_version_is_found_and_stopped(home: Home) -> None:
    run = lay_out(home, WAITS)
    with closing(ControllerDatabase(home.database)) as database:
        assert RunQueue(database).launch(run.id)
    code = "from penstock_controller.monitor import main; main()"
    command = [sys.executable, "-c", code, str(files_of(home, run).path), "penstock_controller.keeper"]

    async def work() -> None:
        async with open_controller(home, ControllerLimits()) as controller:
            assert controller.supervisor.stop(controller.runs.get("eval", run.id))
            (ended,) = await over(controller, run)
            assert (ended.status, ended.launches) == (RunStatus.STOPPED, 1)

    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        process.stdin.write(b"{}")
        process.stdin.close()
        until(is_ready(home, run))
        asyncio.run(work())
    assert ledger(home, run) == ["begin", "asked"]


def test_run_restarts_after_monitor_is_killed_until_it_fails(home: Home) -> None:
    once, always = lay_out(home, ONCE, "once"), lay_out(home, "import os; os.kill(os.getppid(), 9)", "always")

    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=1, launches=3)) as controller:
            await until_async(is_ready(home, once))
            os.kill(monitor_of(home, once), signal.SIGKILL)
            ended = await over(controller, once, always)
        assert [(run.status, run.launches) for run in ended] == [("finished", 2), ("failed", 3)]
        assert ended[1].message.startswith("its process was lost 3 times")

    asyncio.run(work())
    assert [line for line in messages(home, once) if line == "done"] == ["done"]


def test_pending_run_stops_now_and_finished_run_does_not(home: Home) -> None:
    first, second = lay_out(home, WAITS, "first"), lay_out(home, COUNTS, "second")

    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=1)) as controller:
            await until_async(is_ready(home, first))
            assert controller.supervisor.stop(second)
            assert status(controller, second) is RunStatus.STOPPED
            assert not controller.supervisor.stop(second)
            pid = monitor_of(home, first)
            assert controller.supervisor.stop(first)
            await over(controller, first)
            await until_async(lambda: is_gone(pid), "the monitor's end")
            assert not controller.supervisor.stop(first)

    asyncio.run(work())
    assert not files_of(home, second).log.exists()


def test_run_with_missing_secret_or_files_fails_alone(home: Home) -> None:
    lost = lay_out(home, COUNTS, "lost", secrets={"GONE": ""})
    broken, good = lay_out(home, COUNTS, "broken"), lay_out(home, COUNTS, "good")
    files_of(home, broken).job.write_text("{")

    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=1, launches=2)) as controller:
            ended = await over(controller, lost, broken, good)
        assert [run.status for run in ended] == [RunStatus.FAILED, RunStatus.FAILED, RunStatus.FINISHED]
        assert ended[0].message == "Secret(s) not found: GONE"

    asyncio.run(work())


def test_secrets_of_the_vault_reach_the_run_and_no_file(home: Home) -> None:
    script = "import os\nprint('the key is', os.environ['KEY'])\nassert os.environ['KEY'] == 'sesame-open-1234'\n"
    run = lay_out(home, script, secrets={"KEY": ""})

    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=0)) as controller:
            controller.vault.set("KEY", "sesame-open-1234", "user", who=THE_OWNER)
        async with open_controller(home, ControllerLimits()) as controller:
            [ended] = await over(controller, run)
            assert ended.status is RunStatus.FINISHED

    asyncio.run(work())
    assert "the key is [redacted]" in messages(home, run)
    for file in home.path.rglob("*"):
        assert not file.is_file() or file.suffix == ".py" or b"sesame-open" not in file.read_bytes(), file


def test_second_controller_is_refused_and_leftovers_are_removed(home: Home) -> None:
    half, whole = home.create().runs / "half", lay_out(home, COUNTS)
    (half / "code").mkdir(parents=True)

    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=0)):
            assert not half.exists() and files_of(home, whole).job.exists()
            with pytest.raises(ControllerError) as refused:
                async with open_controller(home, ControllerLimits()):
                    pass
        assert refused.value.code == "CONTROLLER_RUNNING"

    asyncio.run(work())
