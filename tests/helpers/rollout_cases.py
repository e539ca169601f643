"""What the runner's tests share: a gateway without engine or socket, and agents made from plain functions."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

from penstock import AgentWorkflow, AgentWorkflowConfig, Grader, GraderConfig, get_rollout_context
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.pool.memory import MemoryPool
from penstock.records import Sampling, Task, make_rollout
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors.base import ExecutorContext
from penstock.rollout.executors.inline import InlineExecutor
from penstock.rollout.runner import Runner
from penstock.sdk.discovery import Agent
from penstock.testing import make_node, make_step

DEADLINE_S = 20
ENTRY = Path(__file__).parents[1] / "conftest.py"
"""The agent's file: errors name the last line below its folder, so every test's own lines count as the author's."""
TASK = Task(id="t", prompt=({"role": "user", "content": "2 times 3?"},), label="6", metadata={"seen": []})


class EngineDown(Exception):
    """As an `openai` client raises it when the gateway says that the engine failed."""

    code = "engine_error"


class FakeGateway:
    """Records each call in the pool as the real one does, with the text that the test asks for as the reply."""

    app = None

    def __init__(self, pool):
        self.pool, self.sessions, self.closed = pool, {}, []

    def open(self, rollout, sampling, *, fresh):
        self.sessions[rollout.id] = []
        return SimpleNamespace(
            token=rollout.id,
            base_url="http://fake/v1",
            flow_token="",
            rollout=rollout,
            sampling=sampling,
            branch_problem=lambda *, ended: "the request of step 0 differs at byte 3",
        )

    def close(self, rollout_id):
        self.closed.append(rollout_id)

    async def call(self, new, reply, transcript="main"):
        """One model call of the running rollout: `new` messages since the last one of the transcript, and the reply to them."""
        name = get_rollout_context().api_key
        steps = self.sessions[name]
        parent = next((step.index for step in reversed(steps) if step.transcript == transcript), None)
        index = len(steps)
        messages = tuple({"role": "user", "content": text} for text in new)
        node = make_node(name, index, (1,), parent=parent, messages_digest=f"n{index}", messages=messages)
        step = make_step(
            name, index, (2,), transcript=transcript, message={"role": "assistant", "content": reply}, messages_digest=f"s{index}"
        )
        steps.append(step)
        await self.pool.append(step, node)
        await asyncio.sleep(0)


async def good_grade(ctx):
    ctx.set_sample_reward("main", 1.0)


def make_agent(run, grade, workflow_config=None, grader_config=None):
    """An agent whose workflow and grader are these functions of their contexts."""

    class Work(AgentWorkflow):
        async def run(self, ctx):
            return await run(ctx)

    class Check(Grader):
        async def grade(self, ctx):
            return await grade(ctx)

    return Agent(entry=ENTRY, workflow=Work, workflow_config=workflow_config, grader=Check, grader_config=grader_config)


class Bench:
    """One runner on a memory pool, with everything it reports."""

    def __init__(self, run, grade=good_grade, *, pool=None, grace_s=0.05, most_agents=None, most_graders=None, **limits):
        self.pool = pool or MemoryPool(Path())
        self.gateway = FakeGateway(self.pool)
        self.reported = []
        events = Events()
        events.listen(lambda kind, fields: self.reported.append((kind, fields)))

        async def workflow(ctx):
            return await run(ctx, self.gateway.call)

        agent = make_agent(
            workflow,
            grade,
            AgentWorkflowConfig(name="w", concurrency={"max_concurrent": most_agents}),
            GraderConfig(name="check", concurrency={"max_concurrent": most_graders}),
        )
        self.author_tasks = AuthorTasks(agent.entry.parent, events, grace_s=grace_s)
        section = RolloutSection(**{"agent_timeout_s": DEADLINE_S, "grader_timeout_s": DEADLINE_S, **limits})
        self.executor = InlineExecutor(
            ExecutorContext(agent=agent, author_tasks=self.author_tasks, section=None, load_transcripts=None)
        )
        self.runner = Runner(
            executor=self.executor,
            grader=agent.grader_name,
            gateway=self.gateway,
            pool=self.pool,
            events=events,
            limits=section,
        )

    @contextlib.asynccontextmanager
    async def opened(self, count=1):
        """The rollouts of one open group."""
        rollouts = [make_rollout("train-0", TASK.id, place) for place in range(count)]
        await self.pool.open_group(TASK, rollouts, seq=0)
        async with asyncio.timeout(DEADLINE_S), self.executor:
            yield rollouts

    async def attempt(self):
        """The attempt that comes of one rollout."""
        async with self.opened() as (rollout,):
            await self.runner.run(rollout, TASK, Sampling())
        return await self.pool.rollout(rollout.id)


def outcome(bench):
    """Run one rollout to its end and check what holds for every end: reported once, gateway closed."""
    attempt = asyncio.run(bench.attempt())
    ends = [fields for kind, fields in bench.reported if kind == "rollout.end"]
    assert [fields["end"] for fields in ends] == [attempt.end]
    assert bench.reported[0][0] == "rollout.start"
    assert bench.gateway.closed == [attempt.ref.id]
    assert (ends[0]["reward"], ends[0]["message"]) == (attempt.reward, attempt.message)
    assert "\n" not in attempt.message
    return attempt
