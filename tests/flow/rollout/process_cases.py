"""For tests of agents in other processes: agent files made from a few lines, their executor, and a bell that they ring."""

import asyncio
import contextlib
import os
import textwrap
from pathlib import Path
from types import SimpleNamespace

import psutil

from penstock.events import Events
from penstock.records import Sampling, Task, make_rollout
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors.base import ExecutorContext
from penstock.rollout.executors.process import ProcessExecutor, ProcessSection
from penstock.sdk.discovery import load_agent

DEADLINE_S = 60
TASK = Task(id="t", prompt=({"role": "user", "content": "2 times 3?"},), label="6", metadata={"seen": []})
SESSION = SimpleNamespace(
    token="the-token", base_url="http://127.0.0.1:9/v1", flow_token="", rollout=make_rollout("g", "t", 0), sampling=Sampling()
)

AGENT = """
import asyncio, ctypes, json, os, signal, subprocess, sys, threading, time
from pathlib import Path
from penstock import AgentWorkflow, AgentWorkflowConfig, Grader, GraderConfig, get_rollout_context

FOLDER = Path(__file__).parent

def ring(text):
    with open(FOLDER / "bell", "w") as bell:
        bell.write(f"{{text}}\\n")

{top}

class Work(AgentWorkflow):
    async def run(self, ctx):
{run}

class Check(Grader):
    async def grade(self, ctx):
{grade}
"""


class Bell:
    """Lines that the agent's processes write, as they come."""

    def __init__(self, folder):
        if not (folder / "bell").exists():
            os.mkfifo(folder / "bell")
        self._fd = os.open(folder / "bell", os.O_RDWR | os.O_NONBLOCK)
        self._text = ""

    async def line(self):
        loop = asyncio.get_running_loop()
        while "\n" not in self._text:
            ready = asyncio.Event()
            loop.add_reader(self._fd, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self._fd)
            self._text += os.read(self._fd, 65536).decode()
        line, _, self._text = self._text.partition("\n")
        return line

    def close(self):
        os.close(self._fd)


def write_agent(folder, run="pass", grade="return 1.0", top=""):
    """An agent file whose methods have these bodies."""
    parts = {name: textwrap.indent(textwrap.dedent(text), " " * 8) for name, text in (("run", run), ("grade", grade))}
    entry = Path(folder) / "agent.py"
    entry.write_text(AGENT.format(top=textwrap.dedent(top), **parts), encoding="utf-8")
    return entry


@contextlib.asynccontextmanager
async def opened(folder, run="pass", grade="return 1.0", top="", tables=({}, {}), artifacts=None, **section):
    """The executor of such an agent, and its bell."""
    agent = load_agent(write_agent(folder, run, grade, top), *tables)
    settings = ProcessSection(**{"grace_s": 0.5, **section})
    given = ExecutorContext(
        agent=agent, author_tasks=AuthorTasks(Path(folder), Events()), section=settings, load_transcripts=None, artifacts=artifacts
    )
    bell = Bell(Path(folder))
    with contextlib.closing(bell):
        async with asyncio.timeout(DEADLINE_S), ProcessExecutor(given) as executor:
            yield SimpleNamespace(
                bell=bell,
                executor=executor,
                run=lambda name="r", timeout_s=DEADLINE_S, task=TASK: executor.run(
                    task, SESSION, rollout_id=name, timeout_s=timeout_s
                ),
                grade=lambda samples=None, name="r", timeout_s=DEADLINE_S: executor.grade(
                    TASK, samples or {}, rollout_id=name, timeout_s=timeout_s
                ),
            )


def gone(processes):
    """Whether all of them have ended, or do so soon."""
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    return not alive


def named(line):
    """The processes whose ids the line holds, as far as they still live."""
    found = []
    for pid in line.split():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def working_in(folder):
    """The processes whose current folder it is: in a sandbox, a program does not know its own id."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(folder) and process.pid != os.getpid():
                found.append(process)
    return found


def below(pid):
    """A process and all that it started."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]
