"""Progress: rate, remaining time and what is being waited for, at a terminal, in a log and in --plain."""

import os
import re
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.app import run
from penstock.cli.dry_run import Notices
from penstock.view.eval_view import EvalView
from penstock.view.live import LiveView, RunningRollouts, RunState, event_line, pace_text

SCRIPT = Path(sys.executable).with_name("penstock")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def started(name: str) -> dict[str, str]:
    return {"rollout_id": name, "group_id": "g", "channel": "train", "task_id": "t"}


def ended(name: str, end: str = "completed") -> dict[str, object]:
    return {"rollout_id": name, "group_id": "g-0", "channel": "train", "end": end, "reward": 1.0, "seconds": 2.0, "message": ""}


def test_rate_and_remaining_time_come_from_events() -> None:
    clock = Clock()
    rollouts = RunningRollouts(clock)
    assert (rollouts.waiting_text(), rollouts.per_second, rollouts.left_s(6)) == ("", None, None)
    for name in "abc":
        rollouts.apply("rollout.start", started(name))
    clock.seconds = 4.0
    rollouts.apply("rollout.end", ended("a"))
    rollouts.apply("rollout.end", ended("b"))
    assert (rollouts.per_second, rollouts.left_s(6)) == (0.5, 8.0)
    rollouts.apply("rollout.grade", {"rollout_id": "c"})
    clock.seconds = 65.0
    assert rollouts.waiting_text() == "1 running, 1 being graded, the longest for 1:05"


def test_a_lost_rollout_that_is_made_again_counts_once() -> None:
    rollouts = RunningRollouts(Clock())
    for name, end in (("a.1", "lost"), ("a.2", "completed")):
        rollouts.apply("rollout.start", started(name))
        rollouts.apply("rollout.end", ended(name, end))
    assert (rollouts.ended, rollouts.started) == (1, {})


@pytest.mark.parametrize(("pace", "text"), [(None, ""), (3.25, "3.2/s"), (123.4, "123/s"), (0.2, "12/min"), (0.001, "3.6/h")])
def test_pace_is_reported_in_unit_that_reads_best(pace, text) -> None:
    assert pace_text(pace) == text


def test_training_step_shows_waiting_and_remaining_time() -> None:
    clock = Clock()
    state = RunState(rollouts_per_step=4, clock=clock)
    state.apply("run.start", {"name": "n", "folder": "f", "model": "m", "steps": 3, "first_step": 1, "resumed": False})
    state.apply("step.start", {"step": 1})
    state.apply("rollout.start", started("a"))
    clock.seconds = 10.0
    assert state.activity == "step 1: sampling, 0/4 rollouts; 1 running, the longest for 0:10"
    waits = event_line("train.wait", {"text": "step 1 waits for 2 complete groups"}, state)
    assert waits == "step 1 waits for 2 complete groups; 1 running, the longest for 0:10"
    entry = {"step": 1, "steps": 3, "reward": 1.0, "groups": 1, "groups_equal": 0, "groups_stale": 0, "rollouts": 4}
    entry |= {"exact_token_rate": 1.0, "tokens_per_s": 5.0, "ends": {"completed": 4}}
    state.apply("train.step", entry)
    assert (event_line("train.step", entry, state) or "").endswith("6/min steps, about 0:20 left")


def console(*, terminal: bool = False) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=200, highlight=False, legacy_windows=False, no_color=True)


def text_of(made: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", made.file.getvalue())


def test_an_evaluation_shows_rate_remaining_time_and_what_runs(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (True, False):
        made = console(terminal=terminal)
        with EvalView(made) as view:
            view("eval.begin", {"model": "m", "folder": "f", "rollouts": 4, "done": 0})
            for name in ("eval-0.0.1", "eval-1.0.1"):
                view("rollout.start", started(name))
            view("rollout.end", ended("eval-0.0.1"))
        found = text_of(made)
        assert re.search(r"[\d,]+/s, about 0:00 left, 1 running, the longest for 0:00", found), found


def test_silent_evaluation_says_what_it_waits_for_in_log() -> None:
    made, said = console(), threading.Event()
    with EvalView(made, silent_s=0.01) as view:
        view("eval.begin", {"model": "m", "folder": "f", "rollouts": 1, "done": 0})
        view("rollout.start", started("eval-0.0.1"))
        write = made.file.write
        made.file.write = lambda text: (write(text), said.set())[0]  # type: ignore[method-assign]
        assert said.wait(30)
    assert "0/1 rollouts, 1 running, the longest for 0:00" in text_of(made)


def test_plain_prints_lines_at_a_terminal_too(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    made = console(terminal=True)
    with LiveView(RunState(rollouts_per_step=1), made, plain=True) as view:
        view("stage", {"text": "loading"})
    assert made.file.getvalue() == "loading\n"


def test_plain_and_json_of_a_training_run_exclude_each_other(capsys) -> None:
    assert run(["train", "--plain", "--json"]) == 2
    assert "--json and --plain go without each other" in capsys.readouterr().err


def test_penstock_alone_lists_existing_commands(capsys) -> None:
    assert run([]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) < 20
    for command in re.findall(r"^  penstock ([a-z]+(?: [a-z]+)?)", said, re.MULTILINE):
        assert run([*command.split(), "-h"]) == 0, command


@pytest.mark.parametrize(
    ("shell", "variables"),
    [
        ("bash", {"COMP_WORDS": "penstock tr", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "penstock tr"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "penstock tr", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_shells_complete_commands(shell: str, variables: dict[str, str]) -> None:
    def asked(instruction: str) -> subprocess.CompletedProcess[str]:
        # By name: --show-completion looks for the shell among the parents, and CI has none.
        environment = {**os.environ, "_PENSTOCK_COMPLETE": f"{instruction}_{shell}", **variables}
        return subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=60)

    done = asked("complete")
    assert "train" in done.stdout and "eval" not in done.stdout
    shown = asked("source")
    assert (shown.returncode, "_PENSTOCK_COMPLETE" in shown.stdout) == (0, True)


def test_dry_run_reports_each_stage_once(capsys):
    notices = Notices()
    for _ in range(3):
        notices("stage", {"text": "downloading a model", "done": 0})
    notices("notice", {"text": "2 of 4 rows have no label"})
    assert capsys.readouterr().err == "penstock: downloading a model\npenstock: 2 of 4 rows have no label\n"
