"""What a person sees of evaluations next to training: lines of their own, and no confusion with what training does."""

from io import StringIO

from rich.console import Console

from penstock.view.live import RunState, event_line, panel


def started() -> RunState:
    state = RunState(rollouts_per_step=8)
    state.apply("run.start", {"name": "r", "folder": "f", "model": "m", "steps": 9, "first_step": 1, "resumed": False})
    state.apply("eval.end", {"when": "before", "step": 0, "reward": 0.25, "rollouts": 2, "seconds": 1.0})
    state.apply("step.start", {"step": 5})
    return state


def test_training_stays_shown_during_an_evaluation() -> None:
    state = started()
    state.apply("eval.start", {"when": "during", "step": 4, "tasks": 2})
    state.apply("rollout.end", {"end": "completed", "channel": "val"})
    state.apply("rollout.end", {"end": "completed", "channel": "train"})
    assert (state.activity, state.evaluating) == ("step 5: sampling, 1/8 rollouts", False)


def test_its_result_is_shown_until_the_last_one_comes() -> None:
    state = started()
    state.apply("eval.end", {"when": "during", "step": 4, "reward": 0.5, "rollouts": 2, "seconds": 1.0})
    console = Console(width=100, record=True, file=StringIO())
    console.print(panel(state))
    assert "0.250 before → 0.500 after step 4" in console.export_text()


def test_begun_ended_skipped_and_failed_ones_have_a_line_each() -> None:
    state = started()
    lines = [
        event_line("eval.start", {"when": "during", "step": 4, "tasks": 2}, state),
        event_line("eval.end", {"when": "during", "step": 4, "reward": 0.5, "rollouts": 2, "seconds": 1.0}, state),
        event_line("eval.skip", {"step": 8, "running": 4, "skipped": 1}, state),
        event_line("eval.fail", {"step": 4, "message": "all failed\nat once"}, state),
    ]
    assert lines == [
        "held-out evaluation after step 4 begins during training: 2 tasks",
        "held-out after step 4: reward 0.500, 2 rollouts in 1.0 s",
        "held-out evaluation after step 8 skipped: that after step 4 still runs",
        "held-out evaluation after step 4 failed: all failed at once",
    ]
