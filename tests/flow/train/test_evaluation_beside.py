"""Held-out evaluations while training continues: when they begin, what they block, and what a later process makes of them."""

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from async_cases import Watched

from penstock.view.export import write_report


def evaluations(run: Watched) -> dict[str, float | None]:
    return json.loads((run.folder / "runs/run/evals.json").read_text())


def held_up(run: Watched, first: int, *, until: int) -> Any:
    """The evaluation whose rollouts are number `first` and the next samples its second token once this version is served."""

    def waits(rollout_id: str, place: int) -> Awaitable[None] | None:
        slow = rollout_id.split(".")[0] in (f"val-{first}", f"val-{first + 1}") and place == 1
        return run.engine.until(lambda: run.engine.version >= until) if slow else None

    return waits


def one_by_one(run: Watched, *steps: int) -> Any:
    """The step after each of these begins to sample once the evaluation between the two has ended."""

    def waits(rollout_id: str, place: int) -> Awaitable[object] | None:
        after = [step for step in steps if rollout_id.startswith(f"train-{step}.")]
        return run.seen("eval.end", after[0]) if after else None

    return waits


def test_evaluations_run_at_the_interval_and_the_end(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=5", "train.eval_every=2")
    run.engine_waits = one_by_one(run, 2, 4)
    summary = run.train()
    assert [(e["when"], e["step"]) for e in run.events("eval.end")] == [("before", 0), ("during", 2), ("during", 4), ("after", 5)]
    assert evaluations(run) == {"before-0": 1.0, "during-2": 1.0, "during-4": 1.0, "after-5": 1.0}
    assert (summary.evals, summary.eval_after) == ({"2": 1.0, "4": 1.0}, 1.0)
    shown = [(entry["step"], entry["eval_step"], entry["eval_reward"]) for entry in run.metrics() if "eval_step" in entry]
    assert shown == [(3, 2, 1.0), (5, 4, 1.0)]


def test_training_continues_while_an_evaluation_runs(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=4", "train.eval_every=1")
    run.engine_waits = held_up(run, 2, until=3)
    run.train()
    kinds = [(kind, fields.get("step")) for kind, fields in run.reported if kind in ("eval.start", "eval.end", "train.step")]
    began, ended = kinds.index(("eval.start", 1)), kinds.index(("eval.end", 1))
    assert ("train.step", 2) in kinds[began:ended]
    assert next(fields["versions"] for fields in run.events("eval.end") if fields["step"] == 1)[1] == 3


def test_evaluation_due_while_another_runs_is_skipped(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=4", "train.eval_every=1")
    run.engine_waits = held_up(run, 2, until=3)
    summary = run.train()
    skips = run.events("eval.skip")
    assert (skips[0]["step"], skips[0]["running"], skips[0]["skipped"]) == (2, 1, 1)
    assert summary.evals["1"] == 1.0 and summary.evals["2"] is None
    assert '"heldout"' in write_report(Path(summary.folder)).read_text()


def test_what_was_evaluated_is_not_evaluated_again_after_a_resume(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=4", "train.eval_every=1")
    run.stop_at = lambda kind, fields: kind == "eval.end" and fields.get("step") == 1
    run.engine_waits = one_by_one(run, 1, 2, 3)
    assert (run.train().status, set(done := evaluations(run))) == ("stopped", {"before-0", "during-1"})
    run.reported.clear()
    run.stop_at = lambda kind, fields: False
    run.train()
    again = {f"{e['when']}-{e['step']}" for e in run.events("eval.start")}
    assert again == {"during-2", "during-3", "after-4"} and evaluations(run).items() >= done.items()


def test_interrupted_evaluation_is_repeated_on_resume(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=3", "train.eval_every=2")
    run.engine_waits = held_up(run, 2, until=99)
    run.stop_at = lambda kind, fields: kind == "eval.start" and fields["step"] == 2
    assert run.train().steps == 3  # the running step is ended, and is the last
    assert "during-2" not in evaluations(run) and {str(a.end) for a in run.attempts("val")[2:]} == {"cancelled"}

    late = Watched(tmp_path, "train.steps=3", "train.eval_every=3")
    late.train()
    assert [(e["when"], e["step"]) for e in late.events("eval.start")] == [("after", 3)]


def test_one_cut_short_right_after_its_step_is_begun_again(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=4", "train.eval_every=2")
    run.stop_at = lambda kind, fields: kind == "train.step" and fields["step"] == 2
    assert (run.train().steps, "during-2" in evaluations(run)) == (2, False)
    run.stop_at = lambda kind, fields: False
    assert run.train().evals == {"2": 1.0}


def test_what_was_measured_of_weights_that_kill_undid_is_forgotten(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=4", "train.eval_every=1", "train.checkpoint_every=2")
    run.stop_at = lambda kind, fields: kind == "train.step" and fields["step"] == 2
    run.engine_waits = one_by_one(run, 1, 2, 3)
    run.train()
    file = run.folder / "runs/run/evals.json"
    file.write_text(json.dumps({**evaluations(run), "during-3": 0.125}))
    run.stop_at = lambda kind, fields: False
    assert run.train().evals["3"] == 1.0


def test_evaluation_all_of_whose_rollouts_fail_does_not_end_training(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=3", "train.eval_every=1")

    async def fail() -> None:
        raise RuntimeError("the engine is broken")

    run.engine_waits = lambda rollout_id, place: fail() if rollout_id.split(".")[0] in ("val-2", "val-3") else None
    summary = run.train()
    (failed,) = run.events("eval.fail")
    assert summary.steps == 3 and summary.evals["1"] is None
    assert failed["step"] == 1 and failed["message"].startswith("all 2 rollouts of the held-out evaluation failed")


def test_nothing_is_evaluated_next_to_training_unless_asked(tmp_path: Path) -> None:
    run = Watched(tmp_path, "train.steps=2")
    assert run.train().evals == {}
    assert [e["when"] for e in run.events("eval.start")] == ["before", "after"]


@pytest.mark.parametrize("every", [1, 2])
def test_evals_are_never_trained_on(tmp_path: Path, every: int) -> None:
    run = Watched(tmp_path, "train.steps=2", f"train.eval_every={every}", "rollout.max_staleness=1")
    run.train()
    assert {name.split("-")[0] for entry in run.metrics() for name in entry["group_ids"]} == {"train"}
