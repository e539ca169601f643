"""The agents in docs/agents.md run as printed."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from cli_cases import called
from doc_pages import DOCS, blocks, page, titled_blocks
from framework_cases import TASK, call, outcome_of

from penstock.cli.app import run
from penstock.records import End
from penstock.sdk.discovery import load_agent
from penstock.train.monitoring import NOTHING_LEARNED

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
    "Strands": [(LOOP, ["solver"] * 2), (PLAN, ["planner", "executor"]), (["Hm.", FORCED], ["solver"] * 2)],
    "LangChain": [(LOOP, ["main"] * 2), (PLAN, ["planner", "executor"]), ([FORCED], ["main"])],
    "openai": [(LOOP, ["main"] * 2), (PLAN, ["planner", "executor"])],
    "anthropic": [(["It is 42."], ["main"])],
    "Blocking code": [(["It is 42."], ["main"])],
}
"""By tab or heading."""
WORKFLOWS = page("agents.md").partition("## Any client")[0]
TABS = ["openai", "Strands", "OpenAI Agents", "LangChain"]


SMALL = [
    part
    for setting in (
        *("model.name=tiny", "train.steps=1", "rollout.groups_per_step=1", "sampling.max_tokens=24"),
        "train.attack_grader=false",
    )
    for part in ("--set", setting)
]
"""For `make test`: no download, and few tokens."""


def python_blocks(tab):
    return titled_blocks(WORKFLOWS, tab, "python")


@pytest.mark.parametrize("task", [TASK, PLAIN], ids=["system prompt", "plain prompt"])
@pytest.mark.parametrize(
    ("tab", "place", "script", "transcripts"),
    [(tab, place, *expected) for tab, scripts in SCRIPTS.items() for place, expected in enumerate(scripts)],
)
def test_every_agent_of_the_page_gets_its_reward(tmp_path, tab, place, script, transcripts, task):
    code = python_blocks(tab)[place]
    file = tmp_path / f"{tab.lower().replace(' ', '_')}_{place}.py"
    file.write_text(code if "Grader" in code else code + GRADER)
    done = outcome_of(load_agent(file, {}, {}), script, task=task)
    assert (done.end, done.message, done.breaks, done.transcripts) == (End.COMPLETED, "", [], transcripts)
    assert done.attempt.reward == 1.0


def printed(folder, code):
    """Writes a block of the page, and its tasks and config, into a folder; returns the page's commands."""
    (folder / "agent.py").write_text(code if "Grader" in code else code + GRADER)
    for kind, name in (("json", "tasks.jsonl"), ("toml", "train.toml")):
        (folder / name).write_text(blocks(WORKFLOWS, kind)[0])
    [commands] = blocks(WORKFLOWS, "bash")
    return [line.partition("#")[0].split()[1:] for line in commands.splitlines()]


def test_tabs_name_the_extras_to_install():
    known = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r'pip install -e "\.\[([\w,-]+)\]"', WORKFLOWS)
    assert len(named) == len(TABS) + 1
    assert all("local" in extras.split(",") and set(extras.split(",")) <= known.keys() for extras in named)


@pytest.mark.slow
@pytest.mark.parametrize("tab", TABS)
def test_first_agent_of_a_tab_trains(tmp_path, tab, monkeypatch, capsys):
    check, train = printed(tmp_path, python_blocks(tab)[0])
    monkeypatch.chdir(tmp_path)
    assert run([*check, *SMALL]) == 0
    assert "rollout     completed" in capsys.readouterr().out and not (tmp_path / "runs").exists()
    assert run([*train, *SMALL]) in (0, NOTHING_LEARNED)
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert (summary["steps"], summary["ends"], summary["shortfalls"]["ungraded"]["count"]) == (1, {"completed": 4}, 0)


@pytest.mark.skipif(os.environ.get("PENSTOCK_NEWCOMER") != "1", reason="takes the real model, and minutes: make test-newcomer")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("tab", "place"), [(tab, place) for tab in TABS for place in range(len(python_blocks(tab)))])
def test_every_agent_trains_as_printed(tmp_path, tab, place):
    for command in printed(tmp_path, python_blocks(tab)[place]):
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
def test_langchain_structured_output_works_with_an_untrained_model(tmp_path, method):
    (tmp_path / "agent.py").write_text(STRUCTURED.replace("METHOD", method) + GRADER)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Is it 42?"}\n')
    (tmp_path / "train.toml").write_text('model.name = "tiny"\ndataset.train = "tasks.jsonl"\nsampling.max_tokens = 200\n')
    done = called(tmp_path, "train", "train.toml", "--dry-run")
    assert done.returncode == 0 and "reward      1.000" in done.stdout, (done.stdout, done.stderr)


@pytest.mark.parametrize("tab", SCRIPTS)
def test_every_block_of_a_tab_is_run(tab):
    assert len(python_blocks(tab)) == len(SCRIPTS[tab])
