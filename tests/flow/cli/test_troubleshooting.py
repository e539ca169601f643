"""Each row of the table in docs/troubleshooting.md: the mistake is made, and the message is the one that the table says."""

import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import run
from penstock.rollout import author_tasks

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| ([a-z-]+) \| [^|]* \| (?P<ticks>`+)([^|]+)(?P=ticks) \| .* \|$", re.MULTILINE)
AGENT = """
from penstock import AgentWorkflow, Grader

class Asker(AgentWorkflow):
    async def run(self, ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)

class One(Grader):
    async def grade(self, ctx):
        return 1.0
"""
CONFIG = """
run.name = "asked"
model.name = "tiny"
engine.name = "cli_engine:open_engine"
dataset.train = "tasks.jsonl"
rollout.agent_timeout_s = 30
"""
CALL = "await ctx.openai().chat.completions.create("
EVAL = ("eval", "run", "run.toml")


def agent(old: str, new: str) -> Callable[[Path], Any]:
    """The mistake of an agent's file in which `old` is `new`."""
    assert old in AGENT
    return lambda folder: (folder / "agent.py").write_text(AGENT.replace(old, new))


def config(line: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "run.toml").write_text(CONFIG + line + "\n")


def tasks(*rows: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "tasks.jsonl").write_text("".join(f"{row}\n" for row in rows))


def blocks(folder: Path) -> None:
    agent(CALL, f"import time\n        time.sleep(1)\n        {CALL}")(folder)


def edited(folder: Path) -> None:
    assert run(list(EVAL)) == 0
    agent("1.0", "0.5")(folder)


def occupied(folder: Path) -> None:
    taken = socket.socket()  # open until the process ends
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    OPEN.append(taken)
    config(f"gateway.port = {taken.getsockname()[1]}")(folder)


OPEN: list[socket.socket] = []
MISTAKES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "blocking-client": (blocks, EVAL),
    "client-without-address": (
        agent(CALL, "from openai import AsyncOpenAI\n        await AsyncOpenAI().chat.completions.create("),
        EVAL,
    ),
    "no-model-call": (agent("await ctx.openai()", "return\n        await ctx.openai()"), EVAL),
    "agent-raises": (agent("        await", "        raise ValueError('no such tool')\n        await"), EVAL),
    "agent-exits": (agent("        await", "        raise SystemExit(1)\n        await"), EVAL),
    "agent-too-slow": (
        lambda folder: [
            agent("        await", "        import asyncio; await asyncio.sleep(60)\n        await")(folder),
            config("")(folder),
            (folder / "run.toml").write_text(CONFIG.replace("timeout_s = 30", "timeout_s = 0.2")),
        ],
        EVAL,
    ),
    "run-not-async": (agent("async def run(self, ctx):\n        await ", "def run(self, ctx):\n        return "), EVAL),
    "no-workflow": (agent("class Asker(AgentWorkflow)", "class Asker"), EVAL),
    "no-grader": (agent("class One(Grader)", "class One"), EVAL),
    "grader-without-reward": (agent("return 1.0", "return None"), EVAL),
    "reward-not-a-number": (agent("return 1.0", "return 'good'"), EVAL),
    "missing-package": (agent("from penstock import", "import strands_of_nothing\nfrom penstock import"), EVAL),
    "no-agent-file": (lambda folder: (folder / "agent.py").unlink(), EVAL),
    "unknown-key": (config("rollout.concurency = 4"), EVAL),
    "broken-toml": (config("rollout.concurrency ="), EVAL),
    "no-dataset": (lambda folder: (folder / "tasks.jsonl").unlink(), EVAL),
    "row-without-prompt": (tasks('{"question": "2 times 3?"}'), EVAL),
    "broken-row": (tasks('{"prompt": "2 times 3?"}', "{"), EVAL),
    "missing-labels": (tasks('{"prompt": "2 times 3?", "label": "6"}', '{"prompt": "2 times 4?"}'), EVAL),
    "rows-beyond": (config(""), (*EVAL, "--rows", "0-9")),
    "edited-since": (edited, EVAL),
    "port-taken": (occupied, EVAL),
    "endpoint-trained": (config(""), ("train", "run.toml", "--set", "engine={name='openai', url='http://127.0.0.1:9/v1'}")),
    "files-in-the-way": (lambda folder: None, ("quickstart", "--template", "tiny")),
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "helpers" / "cli_engine"))
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NOTICE_S": 0.2, "BREAK_S": 0.4, "POLL_S": 0.05}.items():
        monkeypatch.setattr(author_tasks, name, value)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "2 times 3?"}) + "\n")
    return tmp_path


def documented() -> dict[str, str]:
    return {name: message for name, _, message in ROW.findall(PAGE.read_text())}


def test_the_table_has_every_mistake_and_no_other():
    assert documented().keys() == MISTAKES.keys()
    assert len(MISTAKES) >= 20


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_the_message_of_the_table(project, capfd, name):
    mistake, command = MISTAKES[name]
    mistake(project)
    capfd.readouterr()
    run(list(command))
    out, err = capfd.readouterr()
    reported = " ".join((out + err).split())
    assert documented()[name] in reported, reported
    assert "Traceback" not in reported
    sys.modules.pop("agent", None)
