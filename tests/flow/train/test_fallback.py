"""A run whose newest checkpoint is damaged continues from the one before, and waits for nothing that cannot come."""

import asyncio
from pathlib import Path

import pytest
from async_cases import Watched

from penstock.errors import ConfigError, TrainError
from penstock.pool.sqlite import SqlitePool
from penstock.train import loop


def trained_run(folder: Path) -> tuple[Watched, Path]:
    """A run of three steps that stopped after its second, and the folder of its checkpoints."""
    run = Watched(folder)
    run.stop_at = lambda kind, fields: kind == "train.step" and fields["step"] == 2
    assert run.train().status == "stopped"
    run.reported.clear()
    run.stop_at = lambda kind, fields: False
    return run, folder / "runs/run/checkpoints"


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def ledger(folder: Path) -> list[tuple[str, int]]:
    async def read() -> list[tuple[str, int]]:
        pool = SqlitePool(folder)
        try:
            return await pool.trained()
        finally:
            await pool.close()

    return asyncio.run(read())


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.state", "state.json"])
def test_groups_of_a_damaged_checkpoint_are_trained_again(tmp_path: Path, name: str):
    run, checkpoints = trained_run(tmp_path)
    assert ledger(checkpoints.parent) == [("train-0", 1), ("train-1", 2)]
    damage(checkpoints / "000002" / name)
    summary = run.train()
    assert (summary.status, summary.steps, summary.checkpoints_damaged, summary.groups_undone) == ("finished", 3, 1, 1)
    assert name in run.events("checkpoint.damaged")[0]["problem"]
    groups = [{"group_id": "train-1", "version": 2}]
    (shown,) = run.events("checkpoint.fallback")
    assert (shown["version"], shown["step"], shown["damaged"], shown["groups"]) == (1, 1, 1, groups)
    # the number of the lost version is not used again, and its group is trained once
    assert [entry["version"] for entry in run.metrics()] == [1, 3, 4]
    assert [entry["groups_undone"] for entry in run.metrics()] == [0, 1, 0]
    assert [group for group, _ in ledger(checkpoints.parent)] == [name for entry in run.metrics() for name in entry["group_ids"]]
    assert (checkpoints / "000002.damaged").is_dir()


def test_a_checkpoint_that_is_gone_is_made_up_for_too(tmp_path: Path):
    run, checkpoints = trained_run(tmp_path)
    (checkpoints / "000002").rename(tmp_path / "elsewhere")
    assert run.train().groups_undone == 1
    assert [group for group, _ in ledger(checkpoints.parent)] == ["train-0", "train-1", "train-2"]


def test_without_intact_checkpoint_run_is_rejected_and_fresh_starts_over(tmp_path: Path):
    run, checkpoints = trained_run(tmp_path)
    for folder in checkpoints.iterdir():
        damage(folder / "model.safetensors")
    with pytest.raises(TrainError, match="--fresh"):
        run.train()
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["000001", "000002"]  # nothing was touched


def test_a_finished_run_whose_result_is_damaged_makes_it_again(tmp_path: Path):
    run = Watched(tmp_path)
    run.train()
    damage(tmp_path / "runs/run/checkpoints/000003/model.safetensors")
    again = run.train()
    assert (again.already_finished, again.steps, again.checkpoints_damaged) == (False, 3, 1)
    assert run.train().already_finished


def test_config_of_one_run_and_pool_of_another_are_rejected(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run, checkpoints = trained_run(tmp_path / name)
    (tmp_path / "a/runs/run/pool.db").replace(checkpoints.parent / "pool.db")
    with pytest.raises(ConfigError, match=r"config\.json"):
        run.train()


def test_the_evaluation_before_training_is_not_made_with_later_weights(tmp_path: Path):
    run, checkpoints = trained_run(tmp_path)
    (checkpoints.parent / "evals.json").unlink()
    assert run.train().eval_before is None
    assert "the evaluation before training is lost" in run.events("record.damaged")[0]["text"]


def test_damaged_line_of_metrics_is_left_out_and_reported(tmp_path: Path):
    run, checkpoints = trained_run(tmp_path)
    file = checkpoints.parent / "metrics.jsonl"
    file.write_text(file.read_text().replace('"reward":', '"reward":1', 1))
    run.train()
    assert "lacks 1 of 2 steps" in run.events("record.damaged")[0]["text"]
    assert [entry["step"] for entry in run.metrics()] == [2, 3]


def stuck_run(folder: Path) -> Watched:
    """A run whose training rollouts never get a reply."""
    run = Watched(folder)
    run.engine_waits = lambda rollout_id, place: asyncio.Event().wait() if rollout_id.startswith("train") else None
    return run


def test_waiting_run_stops_soon_after_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "STOP_WAIT_S", 0.1)
    monkeypatch.setattr(loop, "POLL_S", 0.05)
    run = stuck_run(tmp_path)
    run.stop_at = lambda kind, fields: kind == "step.start"
    assert run.train().status == "stopped"
    run.engine_waits, run.stop_at = lambda rollout_id, place: None, lambda kind, fields: False
    assert run.train().steps == 3


def test_waiting_run_reports_why_and_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, seconds in (("TELL_S", 0.1), ("POLL_S", 0.05), ("RECHECK_S", 0.2), ("RUNNING_S", -149.5)):
        monkeypatch.setattr(loop, name, seconds)  # a rollout may take 150 s
    run = stuck_run(tmp_path)
    with pytest.raises(TrainError, match="complete"):
        run.train()
    assert run.events("train.wait")[0]["text"] == "step 1 waits for 1 complete groups: 0 are, 1 have rollouts under way"
