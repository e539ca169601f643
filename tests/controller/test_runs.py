"""The queue's rows: what may become of a run, and what may not."""

import re
from collections.abc import Generator
from pathlib import Path

import pytest
from core_cases import SUBMISSION

from penstock.errors import ControllerError
from penstock_controller.database import ControllerDatabase
from penstock_controller.runs import Run, RunFiles, RunQueue, RunStatus, new_id, now


@pytest.fixture
def database(tmp_path: Path) -> Generator[ControllerDatabase]:
    database = ControllerDatabase(tmp_path / "controller.db")
    yield database
    database.close()


@pytest.fixture
def runs(database: ControllerDatabase) -> RunQueue:
    return RunQueue(database)


def add(runs: RunQueue, name: str = "one") -> Run:
    return runs.add("eval", new_id(), name, SUBMISSION)


def test_run_is_found_by_id_and_by_name(runs: RunQueue) -> None:
    run = add(runs)
    assert runs.get("eval", run.id) == runs.get("eval", "one") == run
    assert (run.status, run.submission, run.launches) == (RunStatus.PENDING, SUBMISSION, 0)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", now())
    for wrong in (lambda: runs.get("train", run.id), lambda: runs.get("eval", "two")):
        with pytest.raises(ControllerError, match="penstock") as unknown:
            wrong()
        assert unknown.value.status == 404


def test_names_are_made_fit_and_free(runs: RunQueue) -> None:
    assert [runs.free_name("eval", wanted) for wanted in ("My Run!", "__x__", "ÄÖ", "a_b")] == ["my-run", "x", "run", "a_b"]
    add(runs, "a_b")
    add(runs, "a_b-2")
    assert runs.free_name("eval", "a_b") == "a_b-3" and runs.free_name("train", "a_b") == "a_b"
    assert runs.free_name("eval", "axb") == "axb"
    assert len(runs.free_name("eval", "x" * 500)) == 80


def test_the_first_word_about_an_end_stands(runs: RunQueue) -> None:
    run = add(runs)
    assert runs.launch(run.id) and runs.launch(run.id)
    assert runs.finish(run.id, RunStatus.FINISHED, ended_at="then")
    assert not runs.finish(run.id, RunStatus.FAILED, "late") and not runs.launch(run.id) and not runs.request_stop(run.id)
    ended = runs.get("eval", run.id)
    assert (ended.status, ended.message, ended.ended_at, ended.launches) == (RunStatus.FINISHED, "", "then", 2)


def test_pending_run_stops_now_and_active_run_is_asked(runs: RunQueue) -> None:
    waiting, running = add(runs, "waiting"), add(runs, "running")
    runs.launch(running.id)
    assert runs.request_stop(waiting.id) and runs.request_stop(running.id)
    assert (runs.get("eval", "waiting").status, runs.get("eval", "running").status) == (RunStatus.STOPPED, RunStatus.RUNNING)
    assert not runs.launch(running.id) and runs.get("eval", "running").stop_asked


def test_the_queue_is_oldest_first_and_pages_are_newest_first(runs: RunQueue) -> None:
    names = [add(runs, f"run-{n}").name for n in range(5)]
    assert [run.name for run in runs.waiting()] == names and runs.running() == []
    page, total = runs.page("eval", limit=2, offset=1)
    assert ([run.name for run in page], total) == (["run-3", "run-2"], 5)
    assert runs.page("train", limit=2, offset=0) == ([], 0)


def test_queue_is_durable_and_transactional(database: ControllerDatabase, runs: RunQueue, tmp_path: Path) -> None:
    add(runs)
    with pytest.raises(ZeroDivisionError), database.transaction():
        add(runs, "two")
        _ = 1 / 0
    other = ControllerDatabase(tmp_path / "controller.db")
    assert [run.name for run in RunQueue(other).waiting()] == ["one"]
    other.close()


def test_unusable_database_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "controller.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(ControllerError, match="PENSTOCK_HOME") as failed:
        ControllerDatabase(tmp_path / "controller.db")
    assert (failed.value.code, failed.value.status) == ("STORE_FAILED", 503)


def test_results_lie_where_the_commands_write_them(runs: RunQueue, tmp_path: Path) -> None:
    assert RunFiles(tmp_path).results(add(runs)) == tmp_path / "out" / "evals" / "one"
    assert RunFiles(tmp_path).results(runs.add("train", new_id(), "two", SUBMISSION)) == tmp_path / "out" / "two"
