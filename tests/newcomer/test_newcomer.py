"""A newcomer's second hour, as one story: install, the README's example, an own agent, mistakes, regrade, report, resume.

`make test` reports it with the environment of the tests; `make test-newcomer` (PENSTOCK_NEWCOMER=1) installs a fresh one with pip,
from a copy of the checkout, as the README says, and takes the model of the README.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README, QUICKSTART = (ROOT / "README.md").read_text(), (ROOT / "docs/quickstart.md").read_text()
FRESH = os.environ.get("PENSTOCK_NEWCOMER") == "1"

AGENT = """
import json

from penstock import AgentWorkflow, Grader


def add(a, b):
    return a + b


def multiply(a, b):
    return a * b


TOOLS = {"add": add, "multiply": multiply}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SCHEMAS = [{"type": "function", "function": {"name": name, "parameters": NUMBERS}} for name in TOOLS]


class Calculator(AgentWorkflow):
    async def run(self, ctx):
        client, messages = ctx.openai(), list(ctx.prompt)
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS, max_tokens=8)
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return
            for call in said.tool_calls:
                result = TOOLS[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


class Check(Grader):
    async def grade(self, ctx):
        said = ctx.sample.messages[-1]["content"] or ""
        ctx.add_reward("even", len(said) % 2 / 2)
        return float(ctx.label in said)
"""
GRADER = """
from penstock import Grader


class Kind(Grader):
    async def grade(self, ctx):
        return 1.0
"""
CONFIG = """
[run]
name = "own"
[model]
name = "tiny"
[dataset]
train = "tasks.jsonl"
[rollout]
group_size = 4
groups_per_step = 2
[train]
steps = 3
"""
CALL = "await client.chat.completions.create("
MISTAKES = {
    "agent.py": [
        (CALL, "time_sleep(20) or await client.chat.completions.create(", "blocks the event loop at agent.py, line"),
        (CALL, "await AsyncOpenAI().chat.completions.create(", "no key of a provider is needed here: use ctx.openai()"),
        ("return float(ctx.label in said)", "return 'good'", "reward 'good' is not a finite number; give a finite float"),
    ],
    "train.toml": [("group_size", "groupsize", "unknown key 'rollout.groupsize'; did you mean 'group_size'?")],
    "tasks.jsonl": [('"prompt"', '"question"', "tasks.jsonl, line 1: no prompt; fill 'user_prompt' or 'prompt'")],
}


class Newcomer:
    """A person at a terminal: commands in a folder, each with what it printed."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "PYTHONPATH"))}
        self.environment = kept | {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["penstock", *arguments], cwd=self.folder, env=self.environment, **pipes)

    def types(self, *arguments: str, code: int = 0) -> str:
        """Returns all that the command printed; it must end with `code`, and never with a traceback."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=1500)
        assert process.returncode == code, f"penstock {' '.join(arguments)}: {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return f"{out}\n{err}"

    def writes(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name.replace("_", ".")).write_text(text)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", QUICKSTART, re.DOTALL)


def installed(folder: Path) -> Path:
    """Returns `penstock`, of an environment that pip made from a copy of the checkout, without make."""
    [line] = [text for text in README.splitlines() if text.startswith("pip install")]
    checkout = folder / "checkout"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, files):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    command = line.partition("#")[0].strip().replace("pip", f"{folder / 'venv/bin/python'} -m pip", 1)
    subprocess.run(command, shell=True, cwd=checkout, check=True)
    return folder / "venv/bin/penstock"


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    program = installed(tmp_path) if FRESH else Path(sys.executable).with_name("penstock")
    (tmp_path / "project").mkdir()
    return Newcomer(tmp_path / "project", program)


@pytest.mark.timeout(3600 if FRESH else 600)
def test_the_second_hour_of_a_newcomer(newcomer: Newcomer):
    try_the_quickstart(newcomer)
    newcomer.folder = newcomer.folder.with_name("own")
    newcomer.folder.mkdir()
    write_own_agent(newcomer)
    make_mistakes(newcomer)
    measure(newcomer)
    train_and_kill(newcomer)
    edit_and_go_on(newcomer)


def try_the_quickstart(newcomer: Newcomer) -> None:
    assert "penstock" in newcomer.types("--version")
    assert "fail" not in newcomer.types("doctor").lower()
    newcomer.writes(agent_py=blocks("python")[0], tasks_jsonl=blocks("json")[0], train_toml=blocks("toml")[0])
    small = () if FRESH else ("--set", "model.name=tiny")
    text = newcomer.types("train", "train.toml", "--dry-run", *small)
    assert "checked     config, agent, every row, model" in text and "next        penstock train train.toml" in text
    assert not (newcomer.folder / "runs").exists()
    text = newcomer.types("eval", "run", "train.toml", *small)
    assert "reward" in text and "4 tasks x 1 of" in text and "next        penstock train train.toml" in text
    text = newcomer.types("train", "train.toml", *small, "--set", "train.steps=1")
    assert "step 1/1  reward" in text and "exact 100 %" in text
    if not FRESH:  # the tiny model never says a word of it
        assert "finished and learned nothing" in text and "all rewards equal, every one is 0" in text
    assert "Rollout train-0.0.1" in newcomer.types("pool", "show", "runs/" + run_name(newcomer), "train-0.0.1")


def run_name(newcomer: Newcomer) -> str:
    return next(path.name for path in (newcomer.folder / "runs").iterdir() if (path / "metrics.jsonl").exists())


def write_own_agent(newcomer: Newcomer) -> None:
    tasks = "".join(json.dumps({"prompt": f"{n}*3=", "label": str(n * 3)}) + "\n" for n in range(4))
    newcomer.writes(agent_py=AGENT, tasks_jsonl=tasks, train_toml=CONFIG)
    assert "rollout     completed" in newcomer.types("train", "train.toml", "--dry-run")


def make_mistakes(newcomer: Newcomer) -> None:
    for name, mistakes in MISTAKES.items():
        right = (newcomer.folder / name).read_text()
        for old, wrong, message in mistakes:
            assert old in right
            helper = "from time import sleep as time_sleep\nfrom openai import AsyncOpenAI\n" if name == "agent.py" else ""
            (newcomer.folder / name).write_text(helper + right.replace(old, wrong))
            process = newcomer.start("eval", "run", "train.toml", "--rows", "0", "--fresh")
            out, err = process.communicate(timeout=300)
            assert message in out + err and "Traceback" not in err, (message, out, err)
            assert (process.returncode == 0) == ("blocks" in message), (message, out, err)
        (newcomer.folder / name).write_text(right)


def measure(newcomer: Newcomer) -> None:
    text = newcomer.types("eval", "run", "train.toml", "--name", "first", "--samples", "2")
    assert "Evaluation first finished: 4 tasks x 2 of tiny" in text and "    even" in text
    (newcomer.folder / "kind.py").write_text(GRADER)
    text = newcomer.types("eval", "regrade", "runs/evals/first", "--agent", "kind.py")
    assert "reward      1.000" in text and "penstock eval compare runs/evals/first" in text
    text = newcomer.types("eval", "compare", "runs/evals/first", "runs/evals/first-regraded")
    assert "runs/evals/first-regraded: 1.000" in text and "4 that both tried" in text


def train_and_kill(newcomer: Newcomer) -> None:
    process = newcomer.start("train", "train.toml", "--set", "train.steps=1000")
    assert process.stderr is not None
    next(line for line in process.stderr if line.startswith("step    2/1000"))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    text = newcomer.types("train", "train.toml", "--set", "train.steps=6")
    assert "taken up again after step" in text and "step 6/6  reward" in text
    entries = [json.loads(line) for line in (newcomer.folder / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert all("components/even" in entry for entry in entries)
    newcomer.types("report", "runs/own")
    page = (newcomer.folder / "runs/own/report.html").read_text()
    assert "components/even" in page
    assert "own" in newcomer.types("train", "list")


def edit_and_go_on(newcomer: Newcomer) -> None:
    (newcomer.folder / "agent.py").write_text(AGENT.replace("% 2 / 2", "% 2 / 4"))
    command = ("train", "train.toml", "--set", "train.steps=8")
    text = newcomer.types(*command, code=2)
    assert "agent.py" in text and "--allow-code-change" in text
    assert re.search(r"agent\.py, line \d+: \+ +ctx\.add_reward\(\"even\", len\(said\) % 2 / 4\)", text)
    text = newcomer.types(*command, "--allow-code-change")
    assert "step 8/8  reward" in text
    entries = [json.loads(line) for line in (newcomer.folder / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert [entry["code_changes"] for entry in entries] == [0] * 6 + [1] * 2
    newcomer.types("report", "runs/own")
    assert "may not compare" in (newcomer.folder / "runs/own/report.html").read_text()
