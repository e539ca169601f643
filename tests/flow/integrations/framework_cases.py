"""What the tests of agent frameworks share: one rollout on a real gateway, with the replies that a test writes."""

import asyncio
import contextlib
import json

from gateway_cases import renderer
from rollout_cases import make_agent

from penstock import AgentWorkflowConfig, RolloutContext
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import Sampling, Task, make_rollout
from penstock.rollout.runner import open_runner
from penstock.testing import ScriptedEngine, workbench

TASK = Task(
    id="t", prompt=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 times 7?"}), label="42"
)
SECRETS = (
    "OPENAI_API_KEY",
    "OPENAI_ORG_ID",
    "OPENAI_ORGANIZATION",
    "OPENAI_PROJECT_ID",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
)


def call(name, **arguments):
    """The text by which a policy without its own form calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def engine(*script):
    return ScriptedEngine(script, renderer().tokenizer)


class Outcome:
    """One rollout that has ended: what the pool has of it, and what the grader saw."""

    def __init__(self, attempt, policy):
        self.attempt, self.engine, self.samples = attempt, policy, {}
        self.end, self.message = attempt.end, attempt.message

    @property
    def breaks(self):
        return [node.reason for node in self.attempt.nodes if node.reason]

    @property
    def transcripts(self):
        """Whose call each step is."""
        return [step.transcript for step in self.attempt.steps]

    def said(self, name):
        """Role and text of each message of a transcript, as recorded."""
        return [(message["role"], message.get("content")) for message in self.samples[name].transcript]


def outcome(script, run, *, config=None, max_tokens=500):
    """Run one rollout of the workflow `run(ctx)` to its end, against an engine or the replies of one."""
    seen = {}

    async def grade(ctx):
        seen.update(ctx.samples)
        ctx.set_reward(1.0)

    done = outcome_of(make_agent(run, grade, config or AgentWorkflowConfig(name="w")), script, max_tokens=max_tokens)
    done.samples = seen
    return done


def outcome_of(agent, script, *, max_tokens=500, task=TASK):
    """The same for an agent from a file, with its own grader."""
    policy = script if isinstance(script, ScriptedEngine) else engine(*script)

    async def main():
        section = RolloutSection(agent_timeout_s=100, grader_timeout_s=100)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(120))  # a busy machine imports slowly
            bench = await stack.enter_async_context(workbench(policy, renderer(), serves=True))
            opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=section)
            runner = await stack.enter_async_context(opened)
            rollout = make_rollout("train-0", TASK.id, 0)
            await bench.pool.open_group(task, [rollout], seq=0)
            await runner.run(rollout, task, Sampling(max_tokens=max_tokens))
            return Outcome(await bench.pool.rollout(rollout.id), policy)

    return asyncio.run(main())


def sent(work):
    """The bytes of the requests that `work()` makes in a rollout whose gateway refuses everything."""
    requests = []

    async def refuse(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        requests.append(head + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    async def main():
        async with asyncio.timeout(30), await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            context = RolloutContext(base_url=f"http://127.0.0.1:{port}/v1", api_key="mk-own", rollout_id="r-1")
            with context, contextlib.suppress(Exception):
                await work()

    asyncio.run(main())
    return b"".join(requests).decode()
