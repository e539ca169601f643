"""Every template, evaluated and trained as it is written, with the smallest policy in place of the small one."""

import json

import pytest

from penstock.cli.app import run
from penstock_controller.workspace import init_rollout, make_workspace

TINY = ["model.name=tiny", "workflow.show_examples=false", "workflow.max_tokens=30"]
"""The tiny policy's context is too short for worked examples."""
FORMS = ["tiny", "flow", "command", "multiply-local-strands", "multiply-local-openai"]
"""The others are the same agents in another of these two layouts."""
BRIEF = ["rollout.group_size=2", "rollout.groups_per_step=1", "train.steps=1", "dataset.eval_limit=1", "train.attack_grader=false"]


def options(*settings):
    return [part for setting in settings for part in ("--set", setting)]


def answer(capsys, *arguments):
    code = run([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err or out
    return json.loads(out)


def works(capsys, evals, trainings):
    measured = answer(capsys, "eval", "run", *evals, "--rows", "0-1", *options(*TINY))
    assert (measured["status"], measured["outcome"]["rollouts"], measured["outcome"]["ends"]) == ("finished", 2, {"completed": 2})
    trained = answer(capsys, "train", *trainings, *options(*TINY, *BRIEF))
    assert (trained["status"], trained["steps"], trained["exact_token_rate"]) == ("finished", 1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_template_evaluates_and_trains_without_an_edit(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    next_commands = answer(capsys, "template", "apply", name)["next"]
    evals, trainings = (command.split()[skip:] for command, skip in zip(next_commands[-2:], (3, 2), strict=True))
    works(capsys, evals, trainings)


@pytest.mark.slow
def test_a_new_rollout_evaluates_and_trains_without_an_edit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    init_rollout(make_workspace(tmp_path), "mine")
    works(capsys, ["configs/eval/mine.toml"], ["configs/training/mine.toml"])
