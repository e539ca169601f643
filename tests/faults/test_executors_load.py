"""A thousand rollouts at once, three calls each: none is lost, none gets another's words, and none is held on to."""

import asyncio
import gc
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock import AgentWorkflow, Grader
from penstock.chat.renderer import Renderer
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.gateway import GatewayLimits
from penstock.records import End, Sampling, Task, make_rollout
from penstock.rollout.runner import open_runner
from penstock.rollout.transcripts import transcripts
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import RolloutContext
from penstock.testing import ScriptedEngine, workbench, write_tokenizer

pytestmark = pytest.mark.slow

ROLLOUTS = 1000


class ThreeCalls(AgentWorkflow):
    async def run(self, ctx):
        client, said = ctx.openai(), list(ctx.prompt)
        for turn in range(3):
            answer = await client.chat.completions.create(model="any", messages=said)
            said += [
                dict(answer.choices[0].message.model_dump(include={"role", "content"})),
                {"role": "user", "content": f"turn {turn}"},
            ]


class Same(Grader):
    async def grade(self, ctx):
        replies = [each["content"] for each in ctx.sample.messages if each["role"] == "assistant"]
        ctx.set_reward(float(replies == [ctx.label] * 3))


def make_task(number):
    return Task(id=f"t{number}", prompt=({"role": "user", "content": f"word{number}"},), label=f"word{number}")


async def run_all(renderer, numbers):
    """Run a rollout for each number, all at once; the attempts."""

    def echo(ids):
        return re.findall(r"word\d+", renderer.tokenizer.decode(list(ids)))[0]

    agent = Agent(entry=Path(__file__), workflow=ThreeCalls, workflow_config=None, grader=Same, grader_config=None)
    limits = RolloutSection(agent_timeout_s=240, grader_timeout_s=240)
    async with AsyncExitStack() as stack:
        engine = ScriptedEngine(echo, renderer.tokenizer, chunk=8)
        bench = await stack.enter_async_context(workbench(engine, renderer, serves=True, limits=GatewayLimits()))
        opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=limits)
        runner = await stack.enter_async_context(opened)
        rollouts = {number: make_rollout(f"train-{number}", f"t{number}", 0) for number in numbers}
        for number, rollout in rollouts.items():
            await bench.pool.open_group(make_task(number), [rollout], seq=number)
        async with asyncio.TaskGroup() as group:
            for number, rollout in rollouts.items():
                group.create_task(runner.run(rollout, make_task(number), Sampling(max_tokens=32)))
        return {number: await bench.pool.rollout(rollout.id) for number, rollout in rollouts.items()}


def contexts():
    """The rollouts' contexts that somebody holds; tests before this one may have left some."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) is RolloutContext}


def test_thousand_rollouts_at_once_end_with_their_own_words(tmp_path):
    renderer, before = Renderer.load(write_tokenizer(tmp_path)), contexts()
    attempts = asyncio.run(run_all(renderer, range(ROLLOUTS)))
    assert [attempt.end for attempt in attempts.values()] == [End.COMPLETED] * ROLLOUTS
    for number, attempt in attempts.items():
        assert attempt.reward == 1.0
        assert [(step.rollout_id, step.message["content"]) for step in attempt.steps] == [(attempt.ref.id, f"word{number}")] * 3
        assert transcripts(attempt)["main"].messages[0]["content"] == f"word{number}"
    assert contexts() - before == set()
