"""What a person sees while an evaluation runs, at a terminal and in a log."""

import re
from io import StringIO

import pytest
from rich.console import Console

from penstock.view.eval_view import EvalView


@pytest.fixture(autouse=True)
def _able(monkeypatch):
    """Whatever the terminal of these tests is: a dumb one shows lines, as a log does."""
    monkeypatch.setenv("TERM", "xterm")


def shown(total: int, *, terminal: bool, end: str = "completed") -> list[str]:
    """The lines that an evaluation leaves, less the bar."""
    console = Console(file=StringIO(), force_terminal=terminal, width=120, highlight=False, legacy_windows=False, no_color=True)
    with EvalView(console) as view:
        view("eval.begin", {"model": "m", "folder": "f", "rollouts": total, "done": 0})
        for row in range(total):
            reported = {"rollout_id": f"eval-{row}.0.1", "group_id": f"eval-{row}", "seconds": 0.25, "message": "why", "end": end}
            view("rollout.end", reported | {"reward": 1.0 if end == "completed" else None})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return [line.strip() for line in text.replace("\r", "\n").split("\n") if line.startswith(("row", "first")) or "/" in line[:6]]


def test_a_terminal_shows_each_rows_result_as_it_ends():
    assert shown(3, terminal=True) == [f"row {row}, attempt 1: 1.000 in 0.2 s" for row in range(3)]


def test_of_very_many_a_terminal_shows_the_first_and_some():
    found = shown(5000, terminal=True)
    assert found[0].startswith("row 0,") and len(found) == 101


@pytest.mark.parametrize("terminal", [True, False])
def test_failed_one_is_reported_with_its_reason_once(terminal):
    found = shown(2, terminal=terminal, end="agent_error")
    assert [line for line in found if "first" in line] == ["first rollout to end agent_error: eval-0.0.1: why"]


def test_log_reports_the_first_and_every_tenth():
    found = shown(100, terminal=False)
    assert found[:2] == ["1/100 rollouts, reward 1.000", "10/100 rollouts, reward 1.000"]
    assert len(found) == 11 and found[-1].startswith("100/100")
