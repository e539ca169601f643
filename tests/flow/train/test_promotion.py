"""`train.promote`: a checkpoint is promoted once its held-out reward is better than before at 95 %, and no sooner."""

import json
from pathlib import Path
from typing import Any

import pytest
from async_cases import Watched

from penstock.errors import ConfigError
from penstock.train import promotion


def promoting(folder: Path, good_from: int, *overrides: str) -> Watched:
    """A run of six steps with an evaluation of 24 tasks after every second; from a version on, all are right."""
    run = Watched(folder, "train.steps=6", "train.eval_every=2", "train.promote=true", *overrides)
    rows = [{"prompt": f"Number {n}", "label": str(n)} for n in range(24)]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def says(rollout_id: str, version: int) -> str:
        return f"at {rollout_id.split('.')[1]}" if rollout_id.startswith("train") else f"at {int(version < good_from)}"

    run.engine_says = says
    return run


def promoted(run: Watched) -> dict[str, Any]:
    return json.loads((run.folder / "runs/run/promoted/promotion.json").read_text())


def test_the_first_checkpoint_that_is_better_is_promoted_and_stays_when_it_is_pruned(tmp_path: Path) -> None:
    run = promoting(tmp_path, good_from=4)
    summary = run.train()
    tested = {f"{e['when']}-{e['step']}": e.get("better") for e in run.events("eval.end")}
    assert tested == {"before-0": None, "during-2": False, "during-4": True, "after-6": False}
    assert [entry.get("eval_better") for entry in run.metrics()] == [None, None, False, None, True, None]
    assert (summary.promoted, summary.better) == (4, "than before, at 95 %: +1.00 at step 4")
    assert promoted(run) | {"version": 4, "evaluation": "during-4", "against": "before-0", "difference": 1.0} == promoted(run)
    files = {file.name for file in (tmp_path / "runs/run/promoted").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} < files and "state.json" not in files
    assert not (tmp_path / "runs/run/checkpoints/000004").exists()
    versions = [e["versions"] for e in run.events("eval.end")]
    assert versions == [[0, 0], [2, 2], [4, 4], [6, 6]]  # nothing is trained meanwhile


def test_a_policy_that_is_no_better_is_not_promoted(tmp_path: Path) -> None:
    run = promoting(tmp_path, good_from=99)
    summary = run.train()
    assert summary.promoted is None and not (tmp_path / "runs/run/promoted").exists()
    assert summary.better == "not established at 95 %: evidence 1.0 of 240, in 3 evaluations"


def test_what_a_kill_prevented_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = promoting(tmp_path, 2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(promotion, "_copy", killed)  # between the evaluation and the promotion
        run.train()
    assert not (tmp_path / "runs/run/promoted").exists()
    summary = run.train()
    assert (summary.promoted, promoted(run)["evaluation"]) == (2, "during-2")
    assert summary.better == "than before, at 95 %: +1.00 at step 2"
    assert [e["step"] for e in run.events("eval.end")] == [0, 2, 4, 6]  # none was made twice


def test_rewards_out_of_range_are_told_and_promote_nothing(tmp_path: Path) -> None:
    run = promoting(tmp_path, 2, "train.reward_range=[0, 0.5]")
    summary = run.train()
    assert summary.promoted is None
    told = "a held-out reward of 1 is not in train.reward_range = [0, 0.5]"
    assert summary.better == told and any(told in each["text"] for each in run.events("notice"))


def test_without_held_out_tasks_it_is_refused(tmp_path: Path) -> None:
    run = promoting(tmp_path, 2)
    toml = tmp_path / "run.toml"
    toml.write_text(toml.read_text().replace('eval = "heldout.jsonl"', ""))
    with pytest.raises(ConfigError, match=r"dataset\.eval"):
        run.train()
