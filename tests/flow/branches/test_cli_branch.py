"""`penstock branch` as its user runs it."""

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from penstock.cli.app import run

AGENT = """
import uuid
from penstock import AgentWorkflow, Grader

class Asker(AgentWorkflow):
    async def run(self, ctx):
        client, messages = ctx.openai(), list(ctx.prompt)
        clock = f"it is {uuid.uuid4()}" if ctx.metadata["n"] == 1 else "continue"
        for turn in range(3):
            made = await client.chat.completions.create(model="any", messages=messages, max_tokens=16)
            messages += [{"role": "assistant", "content": made.choices[0].message.content}, {"role": "user", "content": clock}]

class Length(Grader):
    async def grade(self, ctx):
        return float(len(ctx.sample.replies))
"""
CONFIG = """
run.name = "asked"
model.name = "tiny"
engine.name = "cli_engine:open_engine"
dataset.train = "tasks.jsonl"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Generator[Path]:
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(Path(__file__).parents[2] / "helpers" / "cli_engine"))
        (folder / "agent.py").write_text(AGENT)
        (folder / "train.toml").write_text(CONFIG)
        rows = [{"prompt": f"{n} times 3?", "metadata": {"n": n}} for n in range(2)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert run(["eval", "run", "train.toml", "--json"]) == 0
        yield folder


def result(capsys, *arguments: str, code: int = 0):
    capsys.readouterr()
    assert run(["branch", "runs/evals/asked", *arguments, "--json"]) == code, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def test_every_step_gets_a_value_once(project, capsys):
    found = result(capsys, "eval-0.0.1", "--all-steps", "-n", "2")
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    assert all(step["value"]["value"] == 3.0 and step["gain"] == 0.0 for step in found["steps"])
    assert [step["ends"] for step in found["steps"]] == [{"completed": 2}] * 3
    assert found["folder"] == "runs/branches/asked-eval-0.0.1"
    assert result(capsys, "eval-0.0.1", "--all-steps", "-n", "2") == found
    assert run(["pool", "verify", found["folder"]]) == 0
    assert run(["pool", "show", found["folder"], "eval-0.0.1.step2.1.1"]) == 0
    shown = capsys.readouterr().out
    assert "of eval-0.0.1, from its step 2 on" in shown and shown.count("replayed") == 2


def test_one_step_as_text_says_where_the_branches_are(project, capsys):
    assert run(["branch", "runs/evals/asked", "eval-0.0.1", "--step", "1", "-n", "2"]) == 0
    text = capsys.readouterr().out
    assert "2 completed" in text and "penstock pool show runs/branches/asked-eval-0.0.1 eval-0.0.1.step1" in text


def test_program_that_reports_time_is_reported_at_which_byte(project, capsys):
    found = result(capsys, "eval-1.0.1", "--step", "2", "-n", "2", code=1)
    (step,) = found["steps"]
    assert (step["value"], step["ends"]) == (None, {"branch_diverged": 2})
    assert "the request of step 1 differs from that of eval-1.0.1 at byte " in step["problem"] and "it is " in step["problem"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/evals/asked", "eval-9.0.1", "--step", "0"], "no rollout 'eval-9.0.1'"),
        (["runs/evals/asked", "eval-0.0.1", "--step", "3"], "its steps are 0 to 2"),
        (["runs/evals/asked", "eval-0.0.1"], "name a call with --step K"),
        (["runs/evals/other", "eval-0.0.1", "--step", "0"], "not a run folder"),
    ],
)
def test_mistakes_are_reported_in_one_line(project, capsys, arguments, words):
    capsys.readouterr()
    assert run(["branch", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
