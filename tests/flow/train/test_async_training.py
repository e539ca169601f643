"""Asynchronous training, every part real but the engine's pace: what runs next to what, and what becomes of old tokens."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from async_cases import DEADLINE_S, HERE, PacedEngine, Watched

from penstock.records import End


def when(run: Watched, condition: Callable[[PacedEngine], bool]) -> Awaitable[None]:
    """For a token that must wait until the engine has come so far."""
    return run.engine.until(lambda: condition(run.engine))


def test_rollouts_of_next_step_are_sampled_while_trainer_updates(tmp_path: Path) -> None:
    run = Watched(tmp_path, "rollout.max_staleness=1", 'train.loss="async_cases:watched_loss"')
    updating, served = threading.Event(), threading.Event()

    def second_group_waits(rollout_id: str, place: int) -> Awaitable[Any] | None:
        if not rollout_id.startswith("train-1."):
            return None
        if updating.is_set() and place == 4:
            served.set()
        return asyncio.to_thread(updating.wait, DEADLINE_S)

    def first_update_waits() -> None:
        updating.set()
        assert served.wait(DEADLINE_S), "nothing was sampled while the trainer computed"

    run.engine_waits, run.loss_waits = second_group_waits, first_update_waits
    assert run.train().steps == 3


def test_without_staleness_nothing_is_sampled_during_an_update(tmp_path: Path) -> None:
    run = Watched(tmp_path, 'train.loss="async_cases:watched_loss"')
    groups: list[int] = []
    run.loss_waits = lambda: groups.append(len({name.split(".")[0] for name in run.engine.callers if name.startswith("train")}))
    run.train()
    assert groups == [1, 2, 3]


def test_every_token_has_the_version_that_its_engine_held(tmp_path: Path) -> None:
    run = Watched(tmp_path, "rollout.max_staleness=2", "train.steps=4")
    run.train()
    recorded = sorted((a.ref.id, step.versions) for a in run.attempts() for step in a.steps)
    held = sorted((name, versions) for (name, _), replies in run.engine.held.items() for versions in replies)
    assert recorded == [each for each in held if each[0].startswith("train")] and len(recorded) == 16
    assert {version for _, versions in recorded for version in versions} > {0}


def test_request_over_a_publication_trains_both_versions(tmp_path: Path) -> None:
    run = Watched(tmp_path, "rollout.max_staleness=1", "train.steps=2")

    def second_group_waits(rollout_id: str, place: int) -> Awaitable[None] | None:
        return when(run, lambda engine: engine.version == 1) if rollout_id.startswith("train-1.") and place == 2 else None

    run.engine_waits = second_group_waits
    run.train()
    spans = [step.versions for attempt in run.attempts() for step in attempt.steps if attempt.ref.group_id == "train-1"]
    assert spans == [(0, 0, 1, 1, 1), (1, 1, 1, 1, 1)] * 2
    assert (run.metrics()[1]["staleness"], run.metrics()[1]["staleness_max"]) == (pytest.approx(2 / 10), 1)
    assert run.engine.cancelled == 0 and {attempt.end for attempt in run.attempts()} == {End.COMPLETED}


def test_stale_group_is_dropped_and_replaced(tmp_path: Path) -> None:
    run = Watched(tmp_path, "rollout.max_staleness=1", "train.steps=4")

    def first_group_is_slow(rollout_id: str, place: int) -> Awaitable[None] | None:
        return when(run, lambda engine: engine.version >= 2) if rollout_id.startswith("train-0.") and place == 1 else None

    run.engine_waits = first_group_is_slow
    summary = run.train()
    trained = [name for entry in run.metrics() for name in entry["group_ids"]]
    assert (summary.steps, len(trained)) == (4, 4) and "train-0" not in trained
    assert sum(entry["groups_stale"] for entry in run.metrics()) == 1
    assert max(entry["staleness_max"] for entry in run.metrics()) <= 1


def test_group_dropped_at_the_last_step_is_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.rollout.scheduler._RECHECK_S", 1e9)  # a constant with no seam: so that nothing but a word helps
    run = Watched(tmp_path, "rollout.max_staleness=1", "train.steps=3", 'train.loss="async_cases:watched_loss"')
    updating, ended = threading.Event(), threading.Event()

    def first_group_is_slow(rollout_id: str, place: int) -> Awaitable[Any] | None:
        slow = rollout_id.startswith("train-0.") and place == 1
        return asyncio.to_thread(updating.wait, DEADLINE_S) if slow else None

    def second_update_waits_for_it() -> None:
        if run.engine.version == 1:
            updating.set()
            assert ended.wait(DEADLINE_S)

    def first_group_ends(kind: str, fields: dict[str, Any]) -> bool:
        if len([e for e in run.events("rollout.end") if e["group_id"] == "train-0"]) == 2:
            ended.set()
        return False

    run.engine_waits, run.loss_waits, run.stop_at = first_group_is_slow, second_update_waits_for_it, first_group_ends
    assert run.train().steps == 3
    assert [entry["groups_stale"] for entry in run.metrics()] == [0, 0, 1]


def test_groups_that_are_ready_when_it_ends_are_all_trained(tmp_path: Path) -> None:
    run = Watched(tmp_path, "rollout.max_staleness=5", "train.steps=5", 'train.loss="async_cases:watched_loss"')
    ready = threading.Event()

    def all_are_ready() -> None:
        assert ready.wait(DEADLINE_S)

    def listen_for_the_last(kind: str, fields: dict[str, Any]) -> bool:
        if len({e["rollout_id"] for e in run.events("rollout.end") if e["channel"] == "train"}) == 10:
            ready.set()
        return False

    run.loss_waits, run.stop_at = all_are_ready, listen_for_the_last
    assert run.train().steps == 5
    assert [name for entry in run.metrics() for name in entry["group_ids"]] == [f"train-{n}" for n in range(5)]


def test_stopped_run_trains_ready_groups_when_it_is_taken_up(tmp_path: Path) -> None:
    run = Watched(tmp_path, "rollout.max_staleness=5", "train.steps=4")
    run.stop_at = lambda kind, fields: kind == "train.step" and fields["step"] == 2
    assert (run.train().status, len(run.metrics())) == ("stopped", 2)
    run.stop_at = lambda kind, fields: False
    summary = run.train()
    trained = [name for entry in run.metrics() for name in entry["group_ids"]]
    assert (summary.steps, summary.resumed, trained) == (4, True, [f"train-{n}" for n in range(4)])


def test_evaluation_and_training_have_their_own_channel_and_sampling(tmp_path: Path) -> None:
    run = Watched(
        tmp_path, "rollout.max_staleness=1", "sampling.temperature=0.7", "sampling.eval_temperature=0.25", "train.eval_every=1"
    )
    run.train()
    assert {given.temperature for given in run.engine.of_channel("train")} == {0.7}
    assert {given.temperature for given in run.engine.of_channel("val")} == {0.25}
    assert {attempt.ref.channel for attempt in run.attempts("val")} == {"val"}
    trained = {name for entry in run.metrics() for name in entry["group_ids"]}
    assert all(name.startswith("train-") for name in trained)


def test_a_flows_calls_are_sampled_as_its_own_rollout_says(tmp_path: Path) -> None:
    given = ("sampling.temperature=0.7", "sampling.eval_temperature=0.25", "train.eval_every=1", "rollout.max_staleness=1")
    run = Watched(tmp_path, f'agent.entry="{HERE / "flow.py"}"', *given)
    summary = run.train()
    assert {attempt.end for attempt in run.attempts() + run.attempts("val")} == {End.COMPLETED}
    assert {given.temperature for given in run.engine.of_channel("train")} == {0.7}
    assert {given.temperature for given in run.engine.of_channel("val")} == {0.25}
    assert (summary.steps, summary.exact_token_rate) == (3, 1.0) and summary.trained_tokens > 0
