"""What the tests of branching share: a rollout of an agent, recorded on a scripted engine, and branches of it."""

import asyncio
import contextlib
import random

from rollout_cases import TASK, make_agent

from penstock import AgentWorkflowConfig
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import BranchPoint, Sampling, make_rollout
from penstock.rollout.branches import run_branches
from penstock.rollout.runner import open_runner
from penstock.sdk.discovery import Agent
from penstock.testing import ScriptedEngine, workbench

DEADLINE_S = 60


class Branching:
    """One agent on a gateway with a scripted engine."""

    def __init__(self, bench, engine, runner, limits):
        self.bench, self.engine, self.runner, self.limits, self.pool = bench, engine, runner, limits, bench.pool

    async def record(self, name="train-0", task=TASK):
        """A rollout of the agent, as it is recorded."""
        rollout = make_rollout(name, task.id, 0)
        await self.pool.open_group(task, [rollout], seq=None)
        await self.runner.run(rollout, task, Sampling(max_tokens=200))
        return await self.pool.rollout(rollout.id)

    async def branch(self, attempt, *steps):
        """The branches of a recorded rollout from each of these steps."""
        points = [BranchPoint(rollout_id=attempt.ref.id, step=step) for step in steps]
        sampling = Sampling(max_tokens=200)
        names = await run_branches(points, self.runner, pool=self.pool, sampling=sampling, limits=self.limits)
        return [await self.pool.rollout(name) for name in names]


@contextlib.asynccontextmanager
async def branching(renderer, script, run, grade=None, *, pool=None, **limits):
    """`run` is an agent, or the function that is its workflow."""
    engine = ScriptedEngine(script, renderer.tokenizer, chunk=16)
    agent = run if isinstance(run, Agent) else make_agent(run, grade, AgentWorkflowConfig(name="w"))
    section = RolloutSection(**{"agent_timeout_s": DEADLINE_S, "branches": 4, **limits})
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(10 * DEADLINE_S))
        bench = await stack.enter_async_context(workbench(engine, renderer, pool=pool, serves=True))
        opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=section)
        yield Branching(bench, engine, await stack.enter_async_context(opened), section)


def choices(*words, seed=0):
    """An engine that says one of these words, drawn again for every request."""
    draw = random.Random(seed)
    return lambda ids: draw.choice(words)


def replies(attempt):
    return [step.message["content"] for step in attempt.steps]
