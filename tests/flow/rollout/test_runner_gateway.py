"""The runner on the real gateway: what a rollout's end means for calls that are under way or come too late."""

import asyncio
import contextlib

import pytest
from rollout_cases import TASK, good_grade, make_agent

from penstock import AgentWorkflowConfig, get_rollout_context
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import End, Sampling, make_rollout
from penstock.rollout.runner import open_runner
from penstock.testing import ScriptedEngine, ScriptedReply, workbench


async def ask(ctx, **options):
    client = ctx.openai().with_options(max_retries=0)
    return await client.chat.completions.create(model="any", messages=ctx.prompt, **options)


@contextlib.asynccontextmanager
async def stage(renderer, script, run, grade=good_grade, **limits):
    """One rollout, ready to run: gives the engine, and a function that runs it and returns the attempt."""
    engine = ScriptedEngine(script, renderer.tokenizer)
    agent = make_agent(run, grade, AgentWorkflowConfig(name="w"))
    section = RolloutSection(**{"agent_timeout_s": 20, **limits})
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(20))
        bench = await stack.enter_async_context(workbench(engine, renderer, serves=True))
        opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=section)
        runner = await stack.enter_async_context(opened)
        rollout = make_rollout("train-0", TASK.id, 0)
        await bench.pool.open_group(TASK, [rollout], seq=0)

        async def attempt():
            await runner.run(rollout, TASK, Sampling(max_tokens=100))
            return await bench.pool.rollout(rollout.id)

        yield engine, attempt


def test_running_call_is_cancelled_with_the_rollout(renderer):
    async def main():
        async with stage(renderer, [ScriptedReply("never ends", stall_after=3)], ask) as (engine, attempt):
            running = asyncio.create_task(attempt())
            await engine.stalled.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await engine.idle.wait()
            assert engine.cancelled == 1

    asyncio.run(main())


def test_call_that_outlives_workflow_is_cut_and_later_one_refused(renderer):
    async def main():
        left, stalled = [], asyncio.Event()

        async def run(ctx):
            await ask(ctx)
            left.append((asyncio.create_task(ask(ctx)), ctx, get_rollout_context()))
            await stalled.wait()

        async with stage(renderer, ["first", ScriptedReply("late", stall_after=1)], run) as (engine, attempt):
            engine.stalled = stalled
            done = await attempt()
            ((late, ctx, context),) = left
            with pytest.raises(Exception, match="409"):
                await late
            with context, pytest.raises(Exception, match="served"):
                await ask(ctx)
            assert (done.end, len(engine.prompts)) == (End.COMPLETED, 2)

    asyncio.run(main())


@pytest.mark.parametrize(
    "fault", [ScriptedReply("x", busy=True), ScriptedReply("long", fail_after=2), ScriptedReply("long", cut_after=2)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_failing_engine_ends_the_rollout_as_engine_error(renderer, fault, stream):
    async def run(ctx):
        answer = await ask(ctx, stream=stream)
        if stream:
            async for _ in answer:
                pass

    async def main():
        async with stage(renderer, [fault], run) as (_, attempt):
            assert (await attempt()).end is End.ENGINE_ERROR

    asyncio.run(main())


def test_call_that_the_gateway_refuses_is_the_agents_error(renderer):
    async def main():
        async with stage(renderer, ["x"], lambda ctx: ask(ctx, temperature=-1)) as (_, attempt):
            done = await attempt()
            assert (done.end, len(done.steps)) == (End.AGENT_ERROR, 0)
            assert "BadRequestError" in done.message

    asyncio.run(main())


def test_workflow_that_lives_through_a_failing_engine_completes(renderer):
    async def run(ctx):
        with contextlib.suppress(Exception):
            await ask(ctx)
        await ask(ctx)

    async def main():
        async with stage(renderer, [ScriptedReply("long", fail_after=2), "good"], run) as (_, attempt):
            done = await attempt()
            assert (done.end, [step.finish for step in done.steps]) == (End.COMPLETED, ["error", "stop"])

    asyncio.run(main())


def test_workflow_that_closes_its_client_leaves_connections_of_others_open(renderer):
    async def run(ctx):
        async with ctx.openai() as client:
            await client.chat.completions.create(model="any", messages=ctx.prompt)
        await ask(ctx)

    async def main():
        async with stage(renderer, ["one", "two"], run) as (_, attempt):
            assert (await attempt()).end is End.COMPLETED

    asyncio.run(main())
