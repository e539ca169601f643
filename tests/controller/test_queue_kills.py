"""A queue of ten runs whose controller is killed with SIGKILL five times: every run is carried out, once, and its log is whole."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest
from core_cases import COUNTS, DEADLINE_S, files_of, lay_out, lay_out_real, ledger, messages, until

from penstock_controller.database import ControllerDatabase
from penstock_controller.home import Home
from penstock_controller.monitor import kill_stray_processes
from penstock_controller.runs import ExitRecord, Run, RunFiles, RunQueue

KILLS = 5


@pytest.fixture
def home(tmp_path: Path) -> Generator[Home]:
    yield Home(tmp_path / "home")
    for folder in (tmp_path / "home" / "runs").glob("*"):
        kill_stray_processes(RunFiles(folder))


def controller(home: Home) -> "subprocess.Popen[bytes]":
    """A controller process, from before it has opened anything."""
    command = [sys.executable, str(Path(__file__).with_name("core_cases.py")), str(home.path), "3"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})


def is_at(home: Home, runs: list[Run], wanted: int) -> bool:
    return started(home, runs) >= min(wanted, len(runs))


def started(home: Home, runs: list[Run]) -> int:
    return sum(files_of(home, run).log.exists() for run in runs)


@pytest.mark.slow
def test_ten_runs_survive_five_kills_of_the_controller(home: Home) -> None:
    real = [lay_out_real(home, "measure", "eval"), lay_out_real(home, "learn", "train")]
    small = [lay_out(home, COUNTS, f"small-{n}") for n in range(8)]
    runs, chance = [*small[:3], *real, *small[3:]], random.Random(7)
    for kill in range(KILLS):
        wanted = started(home, runs) + chance.randint(0, 2)
        with controller(home) as process:
            if kill % 2:  # as it starts, before or while it launches
                until(lambda: chance.random() < 0.1)
            else:  # once it has got further
                until(partial(is_at, home, runs, wanted))
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    with controller(home) as last:
        assert last.wait(DEADLINE_S) == 0
    check(home, small, real)


def check(home: Home, small: list[Run], real: list[Run]) -> None:
    database = ControllerDatabase(home.database)
    try:
        found = {run.id: run for kind in ("eval", "train") for run in RunQueue(database).page(kind, limit=50, offset=0)[0]}
    finally:
        database.close()
    assert len(found) == 10
    for run in [*small, *real]:
        ended, said = found[run.id], messages(home, run)
        assert (ended.status, ended.message) == ("finished", "")
        assert ExitRecord.read(files_of(home, run)) == ExitRecord(code=0, stopped=False, ended_at=str(ended.ended_at))
        assert said[0] == "the run begins" and said[-1] == "its process ended with exit code 0"
        assert "the run is taken up again: the process before was lost" not in said
    for run in small:
        assert ledger(home, run) == ["begin", "end"]
        assert messages(home, run)[1:-1] == ["first line", *(f"line {n}" for n in range(20)), "last line"]
    assert ledger(home, real[0]) == ["rollout"] and ledger(home, real[1]) == ["rollout"] * 2
    assert all((files_of(home, run).results(run) / "summary.json").exists() for run in real)
