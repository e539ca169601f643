"""For tests of programs as agents: a program made from a few lines, before a real gateway, run by either executor."""

import asyncio
import contextlib
import stat
import textwrap

from penstock.config import AgentSection, RolloutSection
from penstock.events import Events
from penstock.records import Sampling, Task, make_rollout
from penstock.rollout.runner import open_runner
from penstock.sdk.command import command_agent
from penstock.testing import ScriptedEngine, workbench

DEADLINE_S = 60
TASK = Task(id="t", prompt=({"role": "user", "content": "2 times 3?"},), label="the-label-itself", metadata={"kind": "easy"})

GRADER = """
from penstock import Grader

class Check(Grader):
    async def grade(self, ctx):
        assert ctx.label == "the-label-itself"
        ctx.set_reward(0.5 if ctx.sample.transcript[-1]["content"] == "6" else 0.0)
"""

TALK = """
import json, os, sys, urllib.request

def ask(messages):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

"""
"""How a program without packages calls the model."""


def write_program(folder, text, name="agent", shebang="#!/bin/sh"):
    """An executable file in `folder`; how `agent.command` would name it."""
    file = folder / name
    file.write_text(f"{shebang}\n{textwrap.dedent(text)}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return f"./{name}"


def make(folder, *command, workflow=None):
    """The agent that runs `command` in `folder`."""
    (folder / "grader.py").write_text(GRADER)
    source = AgentSection(entry=folder / "grader.py", command=command, folder=folder)
    return command_agent(source, workflow or {}, {})


@contextlib.asynccontextmanager
async def prepared_rollout(renderer, agent, script=("6",), artifacts=None, **limits):
    """One rollout, ready to run: gives a function that runs it and returns the attempt, and the pool."""
    section = RolloutSection(**{"agent_timeout_s": DEADLINE_S, **limits})
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        engine = ScriptedEngine(script, renderer.tokenizer)
        bench = await stack.enter_async_context(workbench(engine, renderer, serves=True))
        opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=section, artifacts=artifacts)
        runner = await stack.enter_async_context(opened)
        rollout = make_rollout("train-0", TASK.id, 0)
        await bench.pool.open_group(TASK, [rollout], seq=0)

        async def attempt(task=TASK):
            await runner.run(rollout, task, Sampling(max_tokens=100))
            return await bench.pool.rollout(rollout.id)

        yield attempt, bench.pool


def attempted(renderer, agent, task=TASK, **options):
    """What came of one rollout."""

    async def main():
        async with prepared_rollout(renderer, agent, **options) as (attempt, _):
            return await attempt(task)

    return asyncio.run(main())
