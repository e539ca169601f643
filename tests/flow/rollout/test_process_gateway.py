"""A real gateway and processes: rollouts recorded and graded across both."""

import asyncio
import contextlib
import re

import pytest
from process_cases import DEADLINE_S, TASK, write_agent

from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import End, Sampling, Task, make_rollout
from penstock.rollout.executors.process import ProcessSection
from penstock.rollout.runner import open_runner
from penstock.sdk.discovery import load_agent
from penstock.testing import ScriptedEngine, ScriptedReply, workbench


@contextlib.asynccontextmanager
async def stage(folder, renderer, script, run, grade="return 1.0", top="", **limits):
    """The engine, and a function that runs tasks at once and returns their attempts."""
    engine = ScriptedEngine(script, renderer.tokenizer)
    agent = load_agent(write_agent(folder, run, grade, top), {}, {})
    section = RolloutSection(**{"executor": "process", "agent_timeout_s": DEADLINE_S, "grader_timeout_s": DEADLINE_S, **limits})
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        bench = await stack.enter_async_context(workbench(engine, renderer, serves=True))
        opened = open_runner(
            agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=section, section=ProcessSection(grace_s=0.5)
        )
        runner = await stack.enter_async_context(opened)

        async def attempts(*tasks):
            rollouts = [make_rollout(f"train-{place}", task.id, 0) for place, task in enumerate(tasks)]
            async with asyncio.TaskGroup() as group:
                for place, (task, rollout) in enumerate(zip(tasks, rollouts, strict=True)):
                    await bench.pool.open_group(task, [rollout], seq=place)
                    group.create_task(runner.run(rollout, task, Sampling(max_tokens=400)))
            return [await bench.pool.rollout(rollout.id) for rollout in rollouts]

        yield engine, attempts


CALLS = {
    "ctx.openai, whose package is loaded before the fork": """
        assert "openai.resources.chat.completions" in sys.modules
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)
        """,
    "openai from the environment": """
        import openai
        async with openai.AsyncOpenAI() as client:
            await client.chat.completions.create(model="any", messages=ctx.prompt)
        """,
    "anthropic from the environment, in a thread": """
        import anthropic
        with anthropic.Anthropic() as client:
            make = client.messages.create
            await asyncio.to_thread(make, model="any", messages=ctx.prompt, max_tokens=50)
        """,
    "a program that it starts": """
        code = "import openai; openai.OpenAI().chat.completions.create(model='any', messages=[{'role': 'user', 'content': '?'}])"
        assert await (await asyncio.create_subprocess_exec(sys.executable, "-c", code)).wait() == 0
        """,
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_find_their_rollout(tmp_path, renderer, call):
    async def main():
        grade = "assert ctx.sample.messages[-1]['content'] == 'six'\nctx.set_sample_reward('main', 0.5)"
        async with stage(tmp_path, renderer, ["six"], CALLS[call], grade) as (_, attempts):
            (attempt,) = await attempts(TASK)
            assert (attempt.end, attempt.reward, attempt.message) == (End.COMPLETED, 0.5, "")
            assert [step.message["content"] for step in attempt.steps] == ["six"]

    asyncio.run(main())


def test_twenty_rollouts_at_once_never_mix(tmp_path, renderer):
    run = """
    answer = await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)
    said = [*ctx.prompt, answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
    await ctx.openai().chat.completions.create(model="any", messages=said)
    return [{"me": os.environ["PENSTOCK_ROLLOUT_ID"], "context": get_rollout_context().rollout_id, "task": ctx.metadata["place"]}]
    """
    grade = """
    (told,) = ctx.sample.reported_messages
    assert told["me"] == told["context"] and told["task"] == ctx.metadata["place"]
    assert ctx.sample.transcript[1]["content"] == f"number {ctx.label}!", ctx.sample.transcript
    return float(ctx.label)
    """

    def reply(prompt):
        return f"{re.search('number [0-9]+', renderer.tokenizer.decode(prompt))[0]}!"

    tasks = [
        Task(id=f"t{n}", prompt=({"role": "user", "content": f"number {n}"},), label=str(n), metadata={"place": n})
        for n in range(20)
    ]

    async def main():
        async with stage(tmp_path, renderer, reply, run, grade) as (_, attempts):
            ended = await attempts(*tasks)
            assert [(each.end, each.reward, each.message) for each in ended] == [(End.COMPLETED, float(n), "") for n in range(20)]
            assert [len(each.steps) for each in ended] == [2] * 20

    asyncio.run(main())


ASK = "await ctx.openai().with_options(max_retries=0).chat.completions.create(model='any', messages=ctx.prompt)"
ENDS = {
    "engine": (ScriptedReply("long", fail_after=2), ASK, End.ENGINE_ERROR, "code: 502"),
    "refused": ("x", ASK.replace("messages=", "temperature=-1, messages="), End.AGENT_ERROR, "BadRequestError"),
    "crash": ("x", f"{ASK}\nos._exit(3)", End.AGENT_ERROR, "workflow 'Work': its process ended with exit code 3"),
    "no call": ("x", "pass", End.AGENT_ERROR, "the workflow made no model call through penstock; use ctx.openai()"),
    "stray": (
        "x",
        "import socket\ntry:\n    socket.getaddrinfo('api.openai.com', 443)\nexcept OSError:\n    pass",
        End.AGENT_ERROR,
        "but called api.openai.com directly",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_rollout_ends_in_the_right_category(tmp_path, renderer, end):
    reply, run, expected, message = ENDS[end]

    async def main():
        async with stage(tmp_path, renderer, [reply], run) as (_, attempts):
            (attempt,) = await attempts(TASK)
            assert attempt.end is expected
            assert message in attempt.message

    asyncio.run(main())


def test_late_agent_is_killed_and_call_cancelled_down_to_engine(tmp_path, renderer):
    async def main():
        run = f"call = asyncio.create_task({ASK.removeprefix('await ')})\nawait asyncio.to_thread(threading.Event().wait)"
        script = [ScriptedReply("never ends", stall_after=3)]
        async with stage(tmp_path, renderer, script, run, agent_timeout_s=4) as (engine, attempts):
            running = asyncio.create_task(attempts(TASK))
            await engine.stalled.wait()
            (attempt,) = await running
            await engine.idle.wait()
            assert (attempt.end, engine.cancelled) == (End.TIMEOUT, 1)

    asyncio.run(main())


def test_grader_that_hangs_is_a_grader_error(tmp_path, renderer):
    async def main():
        async with stage(tmp_path, renderer, ["x"], ASK, "signal.pause()", grader_timeout_s=0.5) as (_, attempts):
            (attempt,) = await attempts(TASK)
            assert attempt.end is End.GRADER_ERROR
            assert "rollout.grader_timeout_s = 0.5" in attempt.message

    asyncio.run(main())
