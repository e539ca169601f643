"""What a person sees while a run trains."""

import io
import json
import re
from typing import Any

import orjson
import pytest
from rich.console import Console

from penstock.records import End
from penstock.view.formatting import clock, counts, percent, sparkline
from penstock.view.live import LiveView, RunState, event_line, panel


class Clock:
    """Time that moves when reported."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def start(**changes: Any) -> dict[str, Any]:
    fields = {"name": "demo", "folder": "runs/demo", "model": "tiny", "steps": 4, "first_step": 1, "resumed": False}
    return fields | changes


def trained(step: int, reward: float | None = 0.5, **changes: Any) -> dict[str, Any]:
    counted: dict[str, Any] = {
        "rewards": [reward],
        "groups": 4,
        "groups_equal": 1,
        "groups_stale": 0,
        "rollouts": 32,
        "ends": {"completed": 32},
    }
    tokens = {"exact_token_rate": 1.0, "sampled_tokens": 900, "trained_tokens": 900, "tokens_per_s": 1234.5}
    return {"step": step, "steps": 4, "version": step, "reward": reward, **counted, **tokens} | changes


def ended(end: str = "completed", message: str = "", channel: str = "train") -> dict[str, Any]:
    return {"rollout_id": "train-0.0.1", "channel": channel, "reward": None, "end": end, "message": message, "seconds": 0.1}


def followed(*events: tuple[str, dict[str, Any]], clock: Clock | None = None) -> RunState:
    state = RunState(rollouts_per_step=32, clock=clock or Clock())
    for kind, fields in events:
        state.apply(kind, fields)
    return state


def drawn(state: RunState, notice: str = "", width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    console.print(panel(state, notice, width=width))
    return console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]


def plain_lines(*events: tuple[str, dict[str, Any]]) -> list[str]:
    out = io.StringIO()
    with LiveView(RunState(rollouts_per_step=32), Console(file=out, width=80)) as view:
        for kind, fields in events:
            view(kind, fields)
    return out.getvalue().splitlines()


def test_sparkline_draws_rewards_between_0_and_1_on_that_scale():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.2, 0.2]) == "▂▂"


def test_a_sparkline_draws_other_rewards_on_their_own_range():
    assert sparkline([-3.0, 5.0]) == "▁█"
    assert sparkline([7.0, 7.0]) == "▅▅"


def test_a_sparkline_leaves_a_blank_for_a_missing_reward():
    assert sparkline([0.0, None, 1.0]) == "▁ █"
    assert sparkline([None]) == " "
    assert sparkline([]) == ""


def test_a_sparkline_of_many_steps_keeps_its_width_and_shape():
    drawing = sparkline([i / 999 for i in range(1000)], width=8)
    assert drawing == "▁▂▃▄▅▆▇█"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (-5, "0:00")])
def test_a_clock_time_reads_as_a_clock(seconds, text):
    assert clock(seconds) == text


def test_a_rate_just_below_one_is_never_shown_as_whole():
    assert percent(1.0) == "100 %"
    assert percent(0.99999) == "99.99 %"
    assert percent(None) == "-"


def test_counts_put_the_largest_first():
    assert counts({"lost": 1, "timeout": 1200}) == "1,200 timeout, 1 lost"


def test_progress_counts_the_rollouts_of_the_running_step_only():
    state = followed(("run.start", start()), ("step.start", {"step": 1, "version": 0}), *[("rollout.end", ended())] * 3)
    assert state.activity == "step 1: sampling, 3/32 rollouts"
    state.apply("rollout.end", ended(channel="val"))
    assert state.done == 3


def test_progress_counts_held_out_rollouts_during_an_evaluation():
    state = followed(("run.start", start()), ("eval.start", {"when": "before", "tasks": 16}), ("rollout.end", ended(channel="val")))
    assert state.activity == "held-out evaluation before training, 1/16 rollouts"


def test_progress_estimates_from_pace_of_this_process_and_evaluation():
    time = Clock()
    state = followed(("run.start", start(first_step=2)), clock=time)
    state.apply("eval.end", {"when": "before", "reward": 0.5, "rollouts": 16, "seconds": 5.0})
    assert state.left_s is None
    state.apply("step.start", {"step": 2, "version": 1})
    time.now = 10.0
    state.apply("train.step", trained(2))
    time.now = 13.0
    assert state.left_s == pytest.approx(2 * 10.0 - 3.0 + 5.0)


def test_progress_knows_what_comes_after_the_last_step():
    state = followed(("run.start", start()), ("train.start", {"step": 4, "groups": 4}))
    assert state.next == "held-out evaluation, report"


def test_progress_keeps_the_most_frequent_reason_of_failure():
    state = followed(("rollout.end", ended("timeout", "late")), *[("rollout.end", ended("agent_error", "no key"))] * 2)
    assert state.failure() == "no key"
    assert state.reasons == {"timeout": {"late": 1}, "agent_error": {"no key": 2}}


@pytest.mark.parametrize("end", End)
def test_every_way_to_fail_can_be_reported_as_json(end):
    state = followed(("rollout.end", ended(end, "why")))
    assert orjson.loads(orjson.dumps([state.ends, state.reasons])) == [{end: 1}, {end: {"why": 1}} if end != "completed" else {}]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_the_panel_never_grows_past_its_width(width):
    failure = ("rollout.end", ended("agent_error", "a very long reason " * 20))
    state = followed(
        ("run.start", start(name="n" * 90)), ("step.start", {"step": 1, "version": 0}), failure, ("train.step", trained(1))
    )
    notice = "Stopping after this step. Press Ctrl-C again to quit at once. Both are safe: start it again to resume."
    lines = drawn(state, notice, width)
    assert max(len(line) for line in lines) <= width


def test_the_panel_shows_what_a_person_asks():
    state = followed(
        ("run.start", start()), *[("train.step", trained(n, n / 4)) for n in (1, 2)], ("step.start", {"step": 3, "version": 2})
    )
    text = "\n".join(drawn(state))
    for shown in ("2/4", "0.500", "▃▅", "8 trained, 2 of equal reward", "100 % exact, 1,234 per second", "step 3: sampling, 0/32"):
        assert shown in text


def test_model_text_is_not_read_as_markup():
    state = followed(("run.start", start(name="[red]x[/red]")), ("rollout.end", ended("agent_error", "[/bold] [link=x]")))
    text = "\n".join(drawn(state))
    assert "[red]x[/red]" in text
    assert "[/bold] [link=x]" in text


def test_without_a_terminal_each_event_that_matters_is_one_line():
    lines = plain_lines(
        ("run.start", start()),
        ("stage", {"text": "loading tiny"}),
        ("eval.start", {"when": "before", "tasks": 16}),
        ("eval.end", {"when": "before", "reward": 0.625, "rollouts": 16, "seconds": 1.25}),
        ("step.start", {"step": 1, "version": 0}),
        ("rollout.end", ended()),
        ("train.start", {"step": 1, "groups": 4}),
        ("train.step", trained(1, 0.25)),
        ("checkpoint", {"version": 1, "folder": "x"}),
        ("train.step", trained(2, None, tokens_per_s=None, exact_token_rate=None)),
        ("run.stop", {"reason": "asked to"}),
    )
    assert [re.sub(r"  \S+ steps, about .* left$", "", line) for line in lines] == [
        "run demo in runs/demo: model tiny, 4 steps",
        "loading tiny",
        "held-out evaluation before training: 16 tasks",
        "held-out before training: reward 0.625, 16 rollouts in 1.2 s",
        "step 1/4  reward 0.250  groups 4 (1 equal)  exact 100 %  1,234 tok/s  ▃",
        "step 2/4  reward -  groups 4 (1 equal)  exact -  - tok/s  ▃ ",
        "stopped: asked to",
    ]


def test_a_step_shows_the_reward_of_each_trained_policy():
    policies = {
        "planner": {"frozen": False, "reward": 0.5},
        "executor": {"frozen": False, "reward": None},
        "judge": {"frozen": True, "reward": 0.5},
    }
    *_, line = plain_lines(("run.start", start()), ("train.step", trained(1, 0.25, policies=policies)))
    assert line == "step 1/4  reward 0.250  planner 0.500  groups 4 (1 equal)  exact 100 %  1,234 tok/s  ▃"


def on_terminal(kind: str) -> io.StringIO:
    """What a run's first events leave on a terminal of this kind, whatever the tests themselves run on."""
    out, environment = io.StringIO(), {"TERM": kind}
    console = Console(file=out, width=80, force_terminal=True, force_interactive=True, _environ=environment)
    with LiveView(RunState(rollouts_per_step=32), console) as view:
        view("run.start", start())
        view("stage", {"text": "loading tiny"})
    return out


def test_on_terminal_that_cannot_move_its_cursor_lines_are_printed():
    assert "loading tiny\n" in on_terminal("dumb").getvalue()


def test_on_terminal_panel_is_drawn_and_no_lines_are_printed():
    out = on_terminal("xterm-256color")
    assert "loading tiny" in out.getvalue()
    assert "run demo in runs/demo" not in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[2K"), "the panel is gone when the view closes"


def test_stage_progress_is_one_line_and_a_percentage():
    steps = [("stage", {"text": "downloading", "done": done, "total": 8}) for done in (0, 1, 2)]
    assert plain_lines(*steps) == ["downloading"]
    assert followed(*steps).activity == "downloading, 25%"
    assert followed(*steps, ("stage", {"text": "loading"})).activity == "loading"


def test_without_a_terminal_a_way_to_fail_is_reported_once():
    lines = plain_lines(*[("rollout.end", ended("timeout", "it ran\ntoo long"))] * 3, ("rollout.end", ended("lost")))
    assert lines == [
        "first rollout to end timeout: train-0.0.1: it ran too long",
        "first rollout to end lost: train-0.0.1: no message",
    ]


def test_run_taken_up_again_shows_rewards_of_all_its_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(trained(n, 0.0), separators=(",", ":")) + "\n" for n in (1, 2)))
    lines = plain_lines(("run.start", start(folder=str(tmp_path), resumed=True, first_step=3)), ("train.step", trained(3, 1.0)))
    assert "taken up again after step 2" in lines[0]
    assert lines[1].endswith("▁▁█")


def test_quarantined_groups_and_misreports_are_listed():
    crash = {"group_id": "train-3", "reason": "crashed the trainer", "message": "KeyError:\n'x'"}
    short = {"group_id": "train-4", "reason": "too few rollouts completed", "failed": 2}
    claim = {"rollout_id": "train-0.0.1", "transcripts": ["solver"]}
    events = [("group.drop", crash), ("group.drop", short), ("rollout.misreported", claim), ("rollout.misreported", claim)]
    assert plain_lines(*events) == [
        "group train-3 set aside, crashed the trainer: KeyError: 'x'",
        "train-0.0.1: the agent reports another conversation as solver than was recorded, which is graded",
    ]


REPLIES = {
    "best": {"reward": 1.0, "text": "It is 42."},
    "worst": {"reward": 0.0, "text": "I do not know."},
    "commonest": {"count": 3, "of": 32, "text": "It is 42."},
}


def test_replies_are_shown_in_the_panel_and_every_few_lines():
    state = followed(("run.start", start()), ("train.step", trained(1, replies=REPLIES)))
    assert any("best" in line and "1.000: It is 42." in line for line in drawn(state))
    console = Console(file=io.StringIO(), width=200)
    view = LiveView(RunState(rollouts_per_step=32), console)
    for step in range(1, 7):
        view("train.step", trained(step, replies=REPLIES))
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert [line.strip() for line in lines if "worst" in line] == ["worst reply, 0.000: I do not know."] * 2


def test_a_step_line_has_the_named_parts_of_the_reward():
    fields = trained(1, 0.5) | {"components/format": 0.2, "components/length": -0.125}
    line = event_line("train.step", fields, followed(("run.start", start())))
    assert line is not None
    assert "reward 0.500  format 0.200  length -0.125  groups" in line


def test_a_step_line_says_how_many_rollouts_failed():
    state = followed(("run.start", start()))
    failed, ungraded = {"count": 16, "reason": "agent_error: boom"}, {"count": 2, "reason": "no reward"}
    found = {"failed": failed, "ungraded": ungraded, "wrong": {"count": 3, "reason": "reward 0, below 1"}}
    line = event_line("train.step", trained(1, 1.0, shortfalls=found), state)
    assert line is not None
    assert "reward 1.000  (16 of 32 rollouts failed: agent_error: boom; 2 of 32 rollouts ungraded: no reward)  groups" in line
