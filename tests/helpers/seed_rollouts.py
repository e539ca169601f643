"""Runs code of the seed documents as rollouts: discovered, on a real gateway over a scripted engine, and graded."""

import ast
import asyncio
import inspect
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from osmosis_ai.rollout import AgentWorkflow, Grader
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import Rollout, Sampling, Task, make_rollout
from penstock.rollout.executors.inline import InlineExecutor
from penstock.rollout.runner import open_runner
from penstock.sdk.discovery import Agent, load_agent
from penstock.testing import ScriptedEngine, workbench

DEADLINE_S = 60
TASK = Task(
    id="t",
    prompt=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 times 7?"}),
    label="42",
    metadata={"level": 1},
)
GRADER = """
from osmosis_ai.rollout import Grader, GraderContext

class SmallGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        for name in ctx.get_samples():
            ctx.set_sample_reward(name, 0.5)
"""


class RolloutResults(NamedTuple):
    """The finished rollouts, and the model calls that they made."""

    attempts: list[Rollout]
    heard: list[dict[str, str]]
    """The headers of each model call, as the gateway received them."""
    samples: dict[str, Any]
    """What the grader of the last rollout saw."""
    most: int
    """How many calls were served at once, at most."""

    @property
    def attempt(self) -> Rollout:
        (only,) = self.attempts
        return only

    @property
    def ids(self) -> list[tuple[str, str]]:
        """Rollout and transcript of each call, by its headers."""
        return [(headers["x-rollout-id"], headers["x-sample-id"]) for headers in self.heard]


class RecordingExecutor(InlineExecutor):
    """Keeps the samples that the grader is given."""

    seen: Any = None

    async def grade(self, task, samples, **options):
        self.seen = samples
        return await super().grade(task, samples, **options)


class RequestLog:
    """ASGI middleware in front of the gateway: keeps the headers of each call, and the most calls in flight at once."""

    def __init__(self, app):
        self.app, self.heard, self.under_way, self.most = app, [], 0, 0

    async def __call__(self, scope, receive, send):
        self.heard.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.app(scope, receive, send)
        finally:
            self.under_way -= 1


def agent_of(folder: Path, code: str, workflow=None) -> Agent:
    """What discovery finds in a file of this code; a grader is added where it has none."""
    entry = folder / "agent.py"
    entry.write_text(code if "(Grader)" in code else code + GRADER)
    return load_agent(entry, workflow or {}, {})


def agent_around(run) -> Agent:
    """An agent whose workflow is this function of its context."""

    class Work(AgentWorkflow):
        async def run(self, ctx):
            return await run(ctx)

    class Check(Grader):
        async def grade(self, ctx):
            ctx.set_reward(0.5)

    return Agent(entry=Path(__file__), workflow=Work, workflow_config=None, grader=Check, grader_config=None)


def run_rollouts(renderer, agent: Agent, script, count=1, task=TASK) -> RolloutResults:
    """Run `count` rollouts of the agent at once."""
    return asyncio.run(_run_rollouts(renderer, agent, script, count, task))


async def _run_rollouts(renderer, agent: Agent, script, count: int, task: Task) -> RolloutResults:
    limits = RolloutSection(executor="seed_rollouts:RecordingExecutor", agent_timeout_s=DEADLINE_S)
    async with serving(renderer, script) as (bench, log):
        rollouts = [make_rollout("train-0", task.id, place) for place in range(count)]
        await bench.pool.open_group(task, rollouts, seq=0)
        opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=limits)
        async with opened as runner, asyncio.TaskGroup() as group:
            bench.gateway.reward_function = runner.compute_reward
            for rollout in rollouts:
                group.create_task(runner.run(rollout, task, Sampling(max_tokens=200)))
        attempts = [await bench.pool.rollout(rollout.id) for rollout in rollouts]
    return RolloutResults(attempts, log.heard, runner.executor.seen, log.most)


@asynccontextmanager
async def serving(renderer, script):
    """A gateway on a socket, as agents reach it, with a request log in front; nothing in it takes longer than the deadline."""
    async with asyncio.timeout(DEADLINE_S), workbench(ScriptedEngine(script, renderer.tokenizer), renderer) as bench:
        bench.gateway.app = log = RequestLog(bench.gateway.app)
        async with bench.gateway:
            yield bench, log


async def execute(code: str, names: dict[str, Any]) -> None:
    """Run a fragment inside the running rollout; it may await."""
    running = eval(compile(code, "fragment", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(running):
        await running
