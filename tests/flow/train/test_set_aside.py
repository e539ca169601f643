"""A group that the trainer cannot bear is set aside, counted and reported; all others are trained, exactly once."""

import asyncio
import json
from pathlib import Path

import poisoned_advantages
import pytest
from typer.testing import CliRunner

from penstock.cli.app import app, run
from penstock.pool import POOLS
from penstock.sdk import context
from penstock.train.loop import BEYOND, CRASHED

CONFIG = Path(__file__).parents[2] / "helpers/tiny_run/train.toml"
GROUPS = 2


@pytest.fixture
def train(tmp_path, capsys):
    """Trains, or continues; the exit code, and what was printed as JSON."""

    def train(advantage="grpo", *, steps=2, **settings):
        chosen = {"run.folder": f'"{tmp_path}"', "train.advantage": f'"{advantage}"', "train.steps": steps, **settings}
        chosen = {"rollout.groups_per_step": GROUPS, "rollout.group_size": 2, "train.checkpoint_every": 1, **chosen}
        words = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
        code = run(["train", str(CONFIG), *words, "--json"])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, json.loads(out or err.splitlines()[-1])

    train.folder = tmp_path / "tiny"
    return train


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def drops(folder):
    return {e["group_id"]: (e["reason"], e["message"]) for e in lines(folder, "events.jsonl") if e["kind"] == "group.drop"}


def in_pool(folder, read):
    async def whole():
        pool = POOLS.load("sqlite")(folder)
        try:
            return await read(pool)
        finally:
            await pool.close()

    return asyncio.run(whole())


def show(folder, group_id):
    """The second line of `pool show`."""
    return CliRunner().invoke(app, ["pool", "show", str(folder), group_id]).output.splitlines()[1]


def trained(folder):
    return [group_id for group_id, _ in in_pool(folder, lambda pool: pool.trained())]


def test_crashing_group_is_quarantined_after_two_attempts(train):
    advantage, message = "poisoned_advantages:raising", "ZeroDivisionError: no spread at all"
    poisoned_advantages.tried.clear()
    code, summary = train(advantage, steps=1)
    assert (code, summary["status"], summary["dropped"]) == (0, "finished", {CRASHED: 1})
    (entry,) = lines(train.folder, "metrics.jsonl")
    assert (entry["groups_set_aside"], entry["group_ids"]) == (1, ["train-0", "train-2"])
    ((reason, reported),) = drops(train.folder).values()
    assert reason == CRASHED and reported == message
    assert poisoned_advantages.tried["train-1"] == 2

    assert show(train.folder, "train-1") == f"Not trained, {CRASHED}: {message}"
    code, summary = train(advantage, steps=3)  # it stays set aside
    assert (code, summary["steps"], summary["dropped"]) == (0, 3, {CRASHED: 1})
    assert trained(train.folder) == ["train-0", *(f"train-{n}" for n in range(2, 7))]
    assert [entry["groups_set_aside"] for entry in lines(train.folder, "metrics.jsonl")] == [1, 0, 0]
    assert poisoned_advantages.tried["train-1"] == 2


def test_trainer_that_no_group_passes_ends_with_one_line(train):
    code, reported = train("poisoned_advantages:broken", steps=1)
    assert (code, "6 groups crashed the trainer" in reported["error"]["message"]) == (1, True)


POISONOUS = """
import sys
sys.path.insert(0, {tiny!r})
from agent import TinyWorkflow
from penstock import Grader

class Check(Grader):
    async def grade(self, ctx):
        first = ctx.sample.messages[0]["content"]
        ctx.set_reward(1e308 if {always} or first == {task!r} else float(len(ctx.sample.messages[-1]["content"]) % 2))
"""


def agent(folder, *, task="", always=False):
    entry = folder / "poisonous.py"
    entry.write_text(POISONOUS.format(tiny=str(CONFIG.parent), task=task, always=always))
    return {"agent.entry": f'"{entry}"'}


def first_task(folder):
    (group,) = in_pool(folder, lambda pool: pool.groups("train", limit=1))
    return group.task.prompt[0]["content"]


def test_reward_that_arithmetic_does_not_bear_is_grader_error(train, tmp_path):
    code, reported = train(steps=1, **agent(tmp_path, always=True))
    assert code == 1  # all rollouts of the step
    assert "grader_error" in reported["error"]["message"]
    assert "reward 1e+308 is not between -1e+09 and 1e+09" in reported["error"]["message"]


def test_run_continues_over_pool_that_already_holds_such_reward(train, tmp_path, monkeypatch):
    train("poisoned_advantages:spread", steps=1)
    task = first_task(train.folder)  # the first of another run with the same seed
    monkeypatch.setattr(context, "MAX_REWARD", float("inf"))  # patched: as before there was a bound
    code, summary = train("poisoned_advantages:spread", steps=2, **agent(tmp_path, task=task), **{"run.name": '"old"'})
    assert (code, summary["dropped"]) == (0, {BEYOND: 1})
    assert list(drops(tmp_path / "old")) == ["train-0"]
    assert trained(tmp_path / "old") == ["train-1", "train-2", "train-3", "train-4"]
