"""The ground that all stations stand on: errors, registry tables, events."""

import asyncio
import json

import pytest

from penstock.errors import ConfigError, DatasetError, GraderError, ModelError, PenstockError, boundary
from penstock.events import Events
from penstock.records import End, Grade, Rollout, make_rollout
from penstock.registry import Registry


def test_boundary_names_a_foreign_error_once_and_keeps_its_cause():
    with (
        pytest.raises(GraderError, match="ZeroDivisionError") as caught,
        boundary(GraderError, "grading r1"),
    ):
        _ = 1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_boundary_lets_our_own_errors_through_unchanged():
    mine = ConfigError("said already")
    with pytest.raises(ConfigError) as caught, boundary(GraderError, "grading r1"):
        raise mine
    assert caught.value is mine


def test_boundary_reports_it_where_the_foreign_error_has_no_message():
    with pytest.raises(GraderError, match="AssertionError"), boundary(GraderError, "grading r1"):
        raise AssertionError


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_boundary_never_swallows_what_ends_a_process_or_task(kind):
    with pytest.raises(kind), boundary(GraderError, "grading r1"):
        raise kind


def test_what_the_user_gave_wrong_is_a_config_error():
    assert issubclass(DatasetError, ConfigError)
    assert issubclass(ModelError, ConfigError)
    assert issubclass(ConfigError, PenstockError)


def test_a_registry_loads_by_name_and_by_module_and_attribute():
    table = Registry("number", {"tau": "math:tau"})
    assert list(table) == ["tau"]
    assert table.load("tau") == table.load("math:tau")


def test_registry_with_base_refuses_what_does_not_derive_from_it():
    table = Registry("pool", {"odd": "math:sqrt", "right": "collections:OrderedDict"}, base=dict)
    assert table.load("right").__name__ == "OrderedDict"
    with pytest.raises(ConfigError, match=r"builtins\.dict"):
        table.load("odd")


def test_a_registry_names_the_nearest_known_name():
    with pytest.raises(ConfigError, match="grppo"):
        Registry("advantage", {"grpo": "x:y", "rloo": "x:z"}).load("grppo")


def test_a_registry_lists_what_it_knows_where_nothing_is_near():
    with pytest.raises(ConfigError, match="module:attr"):
        Registry("advantage", {"rloo": "x:z", "grpo": "x:y"}).load("qqqqqq")


def test_registry_checks_name_without_importing_what_it_stands_for():
    table = Registry("number", {"lazy": "no_such_module_at_all:x"})
    table.check("lazy")
    with pytest.raises(ConfigError, match="lasy"):
        table.check("lasy")


def test_missing_package_is_named_with_way_to_find_remedy():
    with pytest.raises(ConfigError, match="no_such_module_at_all"):
        Registry("engine", {"far": "no_such_module_at_all:x"}).load("far")


@pytest.mark.parametrize("name", ["no_such_module_at_all:x", "math:no_such_name", "math:", ":tau", ":", "..math:tau"])
def test_a_registry_says_in_one_line_what_cannot_be_loaded(name):
    with pytest.raises(ConfigError, match="loaded"):
        Registry("number", {}).load(name)


def test_events_reach_the_file_and_every_listener_in_order(tmp_path):
    heard: list[tuple[str, dict[str, object]]] = []
    with Events(tmp_path / "events.jsonl") as events:
        events.listen(lambda kind, fields: heard.append((kind, fields)))
        events.emit("step.start", step=1)
        events.emit("train.step", step=1, reward=0.5)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step.start", "train.step"]
    assert heard == [("step.start", {"step": 1}), ("train.step", {"step": 1, "reward": 0.5})]


def test_events_of_a_second_process_are_added_after_the_first(tmp_path):
    for number in (1, 2):
        with Events(tmp_path / "events.jsonl") as events:
            events.emit("run.start", number=number)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_events_without_a_file_reach_listeners_also_after_close():
    heard: list[str] = []
    events = Events()
    events.listen(lambda kind, fields: heard.append(kind))
    events.close()
    events.emit("run.end")
    assert heard == ["run.end"]


def test_event_with_invalid_unicode_does_not_stop_the_run(tmp_path):
    with Events(tmp_path / "events.jsonl") as events:
        events.emit("rollout.end", message="half a \ud83d character", reward=float("nan"))
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert line["message"].startswith("half a ")
    assert line["reward"] is None


@pytest.mark.parametrize("rewards", [(1e308,), (1e308, 1e308)])
def test_a_reward_beyond_the_bound_does_not_count(rewards) -> None:
    rollout = make_rollout("train-0", "t", 0)
    grades = tuple(Grade(rollout_id=rollout.id, reward=reward, source="old", step=n) for n, reward in enumerate(rewards))
    assert Rollout(ref=rollout, end=End.COMPLETED, grades=grades).reward is None
