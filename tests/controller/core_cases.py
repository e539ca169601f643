"""Runs of small real processes for the tests of the controller's core; as a program, a controller that serves a folder."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from penstock.config import RunKind
from penstock_controller.context import ControllerLimits, open_controller
from penstock_controller.database import ControllerDatabase
from penstock_controller.home import Home
from penstock_controller.monitor import monitor_pid
from penstock_controller.runs import Run, RunFiles, RunJob, RunQueue, Submission, new_id

T = TypeVar("T")
DEADLINE_S = 120.0
TINY = Path(__file__).parents[1] / "helpers" / "tiny_run"

SUBMISSION = Submission(
    rollout="small", entrypoint="main.py", model="tiny", dataset="rows", dataset_digest="0" * 64, snapshot="1" * 64, tables={}
)
LEDGER = """
import os, sys, time
def note(word):
    with open("ledger", "a") as file:
        file.write(word + "\\n")
note("begin")
print("first line", flush=True)
"""
"""How a script begins that writes down what it did."""
COUNTS = LEDGER + "for n in range(20): print('line', n); time.sleep(0.02)\nprint('last line')\nnote('end')\n"
WAITS = f"""{LEDGER}
import signal
signal.signal(signal.SIGINT, lambda *_: (note('asked'), sys.exit(130)))
print('ready', flush=True)
time.sleep(300)
"""

CONFIG = """
[model]
name = "tiny"
[agent]
entry = "agent.py"
[dataset]
train = "tasks.jsonl"
[rollout]
group_size = 2
groups_per_step = 1
[sampling]
max_tokens = 8
[train]
steps = 1
"""


def lay_out(
    home: Home, script: str, name: str = "small", *, kind: RunKind = "eval", secrets: dict[str, str] | None = None, **job: Any
) -> Run:
    """Queue a run of a Python script, as admission would; `job` goes to its job file."""
    files = RunFiles(home.create().runs / new_id())
    files.code.mkdir(parents=True)
    (files.code / "main.py").write_text(script)
    fields: dict[str, Any] = {"argv": [sys.executable, "main.py"], "cwd": str(files.code), "stop_grace_s": 5.0}
    fields["sandbox"] = "off"  # scripts tell process ids, which are others in a sandbox; test_isolation.py has its own
    RunJob(**fields | job).write(files)
    return add(home, kind, files, name, secrets)


def lay_out_real(home: Home, name: str, kind: RunKind) -> Run:
    """Queue a real evaluation or training run of the tiny policy, on one row; each rollout writes itself down."""
    files = RunFiles(home.create().runs / new_id())
    write_project(files.code)
    config = {
        "run": {"name": name, "folder": str(files.out)},
        "model": {"name": "tiny"},
        "agent": {"entry": str(files.code / "agent.py")},
        "dataset": {"train": str(files.code / "tasks.jsonl")},
        "rollout": {"group_size": 2, "groups_per_step": 1},
        "sampling": {"max_tokens": 8},
        "train": {"steps": 1},
    }
    files.config.write_text(json.dumps(config))
    command = ["eval", "run"] if kind == "eval" else ["train"]
    RunJob(argv=[sys.executable, "-P", "-m", "penstock", *command, str(files.config)], cwd=str(files.code)).write(files)
    return add(home, kind, files, name)


def write_project(folder: Path, rows: int = 1) -> Path:
    """A project with the tiny policy's agent, which notes each rollout in `ledger` where it runs."""
    folder.mkdir(parents=True)
    agent = (TINY / "agent.py").read_text()
    noted = 'client, messages = ctx.openai(), list[Any](ctx.prompt)\n        open("ledger", "a").write("rollout\\n")'
    assert "client, messages = ctx.openai(), list[Any](ctx.prompt)" in agent
    (folder / "agent.py").write_text(agent.replace("client, messages = ctx.openai(), list[Any](ctx.prompt)", noted))
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}*7", "label": str(n * 7)}) + "\n" for n in range(2, rows + 2))
    )
    (folder / "penstock.toml").write_text(CONFIG)
    return folder


def add(home: Home, kind: RunKind, files: RunFiles, name: str, secrets: dict[str, str] | None = None) -> Run:
    database = ControllerDatabase(home.database)
    try:
        submission = replace(SUBMISSION, secrets=dict.fromkeys(secrets or {}, "user"))
        return RunQueue(database).add(kind, files.path.name, name, submission)
    finally:
        database.close()


def files_of(home: Home, run: Run) -> RunFiles:
    return RunFiles(home.runs / run.id)


def ledger(home: Home, run: Run) -> list[str]:
    return (files_of(home, run).code / "ledger").read_text().split()


def messages(home: Home, run: Run) -> list[str]:
    """Every line of the log, which must be whole."""
    return [json.loads(line)["message"] for line in files_of(home, run).log.read_bytes().splitlines()]


def until(look: Callable[[], T], what: str = "it") -> T:
    """The first truthy thing that `look` sees."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come")


async def until_async(look: Callable[[], T], what: str = "it") -> T:
    return await asyncio.to_thread(until, look, what)


def is_ready(home: Home, run: Run) -> Callable[[], bool]:
    """Whether a run has said `ready`."""
    log = files_of(home, run).log
    return lambda: log.exists() and b'"ready"' in log.read_bytes()


def monitor_of(home: Home, run: Run) -> int:
    """The process that keeps a run."""
    return until(lambda: monitor_pid(files_of(home, run)) or 0, "the monitor")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def serve(home: Home, at_once: int) -> None:
    """A controller, until every run is over."""
    async with open_controller(home, ControllerLimits(runs=at_once)) as controller:
        print("open", flush=True)
        await until_async(lambda: not (controller.runs.waiting() or controller.runs.running()), "the last run's end")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(serve(Home(Path(sys.argv[1])), int(sys.argv[2])))
