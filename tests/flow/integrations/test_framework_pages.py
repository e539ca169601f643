"""The agents on the frameworks' pages run as they stand there."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import called
from framework_cases import TASK, call, outcome_of

from penstock.cli.app import run
from penstock.records import End
from penstock.sdk.discovery import load_agent
from penstock.train.stalled import NOTHING_LEARNED

DOCS = Path(__file__).parents[3] / "docs"
GRADER = """

from penstock import Grader


class Any(Grader):
    async def grade(self, ctx):
        return 1.0
"""
PLAIN = replace(TASK, prompt=TASK.prompt[1:])
FORCED = '{"value": 42}}\n</tool_call>'
LOOP = [call("multiply", a=6, b=7), "It is 42."]
PLAN = ["Multiply.", "It is 42."]
SCRIPTS = {
    "strands.md": [(LOOP, ["solver"] * 2), (PLAN, ["planner", "executor"]), (["Hm.", FORCED], ["solver"] * 2)],
    "langchain.md": [(LOOP, ["main"] * 2), (PLAN, ["planner", "executor"]), ([FORCED], ["main"])],
    "plain-client.md": [
        (LOOP, ["main"] * 2),
        (["It is 42."], ["main"]),
        (PLAN, ["planner", "executor"]),
        (["It is 42."], ["main"]),
    ],
}


SMALL = [
    part
    for setting in (
        *("model.name=tiny", "train.steps=1", "rollout.groups_per_step=1", "sampling.max_tokens=24"),
        "train.attack_grader=false",
    )
    for part in ("--set", setting)
]
"""For `make test`: no download, and few tokens."""


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("task", [TASK, PLAIN], ids=["system prompt", "plain prompt"])
@pytest.mark.parametrize(
    ("page", "place", "script", "transcripts"),
    [(page, place, *expected) for page, scripts in SCRIPTS.items() for place, expected in enumerate(scripts)],
)
def test_every_agent_on_the_page_runs_and_gets_its_reward(tmp_path, page, place, script, transcripts, task):
    code = python_blocks(page)[place]
    file = tmp_path / f"{page.removesuffix('.md').replace('-', '_')}_{place}.py"
    file.write_text(code if "Grader" in code else code + GRADER)
    done = outcome_of(load_agent(file, {}, {}), script, task=task)
    assert (done.end, done.message, done.breaks, done.transcripts) == (End.COMPLETED, "", [], transcripts)
    assert done.attempt.reward == 1.0


def printed(page, folder, code):
    """Writes a block of the page, and its tasks and config, into a folder; returns the page's commands."""
    text = (DOCS / page).read_text()
    (folder / "agent.py").write_text(code if "Grader" in code else code + GRADER)
    for kind, name in (("json", "tasks.jsonl"), ("toml", "train.toml")):
        (folder / name).write_text(re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0])
    [commands] = re.findall(r"```\n(penstock train train\.toml.*?)```", text, re.DOTALL)
    return [line.partition("#")[0].split()[1:] for line in commands.splitlines()]


@pytest.mark.parametrize("page", [*SCRIPTS, "openai-agents.md"])
def test_a_page_says_how_to_install_all_that_its_commands_need(page):
    [extras, *_] = re.findall(r"pip install -e '\.\[([\w,-]+)\]'", (DOCS / page).read_text())
    known = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "local" in extras.split(",") and set(extras.split(",")) <= known.keys()


@pytest.mark.slow
@pytest.mark.parametrize("page", [*SCRIPTS, "openai-agents.md"])
def test_the_first_agent_of_a_page_trains_with_its_tasks_config_and_commands(tmp_path, page, monkeypatch, capsys):
    check, train = printed(page, tmp_path, python_blocks(page)[0])
    monkeypatch.chdir(tmp_path)
    assert run([*check, *SMALL]) == 0
    assert "rollout     completed" in capsys.readouterr().out and not (tmp_path / "runs").exists()
    assert run([*train, *SMALL]) in (0, NOTHING_LEARNED)
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert (summary["steps"], summary["ends"], summary["shortfalls"]["ungraded"]["count"]) == (1, {"completed": 4}, 0)


@pytest.mark.skipif(os.environ.get("PENSTOCK_NEWCOMER") != "1", reason="takes the real model, and minutes: make test-newcomer")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("page", "place"),
    [(page, place) for page in [*SCRIPTS, "openai-agents.md"] for place in range(len(python_blocks(page)))],
)
def test_every_agent_of_a_page_trains_as_printed(tmp_path, page, place):
    for command in printed(page, tmp_path, python_blocks(page)[place]):
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, NOTHING_LEARNED) and "Traceback" not in done.stderr, (command, done.stdout, done.stderr)
    ends = json.loads((tmp_path / "runs/run/summary.json").read_text())["ends"]
    assert ends["completed"] >= 1, ends


STRUCTURED = """
from pydantic import BaseModel

from penstock import AgentWorkflow
from penstock.integrations.langchain import chat_model


class Answer(BaseModel):
    \"\"\"The answer to the question.\"\"\"

    right: bool


class Structured(AgentWorkflow):
    async def run(self, ctx):
        answer = await chat_model().with_structured_output(Answer, method="METHOD").ainvoke(ctx.prompt)
        assert isinstance(answer, Answer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_langchain_comes_from_a_model_that_never_learned_it(tmp_path, method):
    (tmp_path / "agent.py").write_text(STRUCTURED.replace("METHOD", method) + GRADER)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Is it 42?"}\n')
    (tmp_path / "train.toml").write_text('model.name = "tiny"\ndataset.train = "tasks.jsonl"\nsampling.max_tokens = 200\n')
    done = called(tmp_path, "train", "train.toml", "--dry-run")
    assert done.returncode == 0 and "reward      1.000" in done.stdout, (done.stdout, done.stderr)


@pytest.mark.parametrize("page", SCRIPTS)
def test_no_block_of_the_page_is_left_out_and_its_links_lead_somewhere(page):
    assert len(python_blocks(page)) == len(SCRIPTS[page])
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (DOCS / page).read_text())
    assert [link for link in links if not (DOCS / link).exists()] == []
