"""What the tests of the examples share: scripted policies, and a runner for an example's agent."""

import asyncio
import contextlib
import re
from pathlib import Path

from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import Sampling
from penstock.rollout.runner import open_runner
from penstock.rollout.scheduler import run_once
from penstock.sdk.discovery import load_agent
from penstock.testing import ScriptedEngine, workbench

EXAMPLES = Path(__file__).parents[3] / "examples"
QUESTION = re.compile(r"What is (\d+) times (\d+)\?")
REPORTED = re.compile(r"<tool_response>\n(.+?)\n</tool_response>", re.DOTALL)


def written_call(a, b, name="multiply"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def multiplier(renderer, call=written_call, answer=lambda result: result):
    """A script that calls the tool for the last question, then answers with what it received."""

    def reply(prompt):
        text = renderer.tokenizer.decode(prompt)
        reported = REPORTED.findall(text.rpartition("What is ")[2])
        a, b = QUESTION.findall(text)[-1]
        return answer(reported[-1]) if reported else call(a, b)

    return reply


@contextlib.asynccontextmanager
async def example_runner(renderer, script, entry, *, workflow=None, **limits):
    """An example's agent on its own gateway: the runner, its pool, its limits, and the engine, which knows its prompts."""
    engine = ScriptedEngine(script, renderer.tokenizer, chunk=16)
    agent = load_agent(EXAMPLES / entry, {"max_tokens": 150} if workflow is None else workflow, {})
    section = RolloutSection(agent_timeout_s=60, **limits)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(60))
        bench = await stack.enter_async_context(workbench(engine, renderer, serves=True))
        opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=section)
        yield await stack.enter_async_context(opened), bench.pool, section, engine


async def attempts(renderer, script, tasks, entry, *, concurrency=8, workflow=None, **limits):
    """Every task tried once; and the engine."""
    async with example_runner(renderer, script, entry, workflow=workflow, **limits) as (runner, pool, _, engine):
        limits = RolloutSection(concurrency=concurrency)
        names = await run_once(tasks, runner, pool=pool, sampling=Sampling(max_tokens=200), limits=limits)
        done = [await pool.rollout(name) for name in names]
    return done, engine
