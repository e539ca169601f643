"""The run's grader, asked by a flow while its rollout runs."""

import asyncio

import pytest
from rollout_cases import TASK, Bench

from penstock.errors import GraderError, PoolError
from penstock.records import Sampling

SAID = [{"role": "user", "content": "2 times 3?"}, {"role": "assistant", "content": "6"}]


def judged(grade, fields=None, *, rollout_id="train-0.0.1"):
    """What a workflow is informed that asks while it runs, and the attempt afterwards."""
    reported = []

    async def work(ctx, call):
        await call(["2 times 3?"], "6")
        reported.append(await bench.runner.compute_reward(rollout_id, SAID, fields or {}))

    bench = Bench(work, grade)

    async def main():
        async with bench.opened() as (rollout,):
            await bench.runner.run(rollout, TASK, Sampling())
        return await bench.pool.rollout(rollout.id)

    attempt = asyncio.run(main())
    return reported, attempt


def test_grader_sees_conversation_that_is_reported_with_label_and_metadata():
    seen = []

    async def grade(ctx):
        seen.append((ctx.label, [message["content"] for message in ctx.sample.messages], ctx.sample.steps, ctx.metadata))
        return 0.5

    reported, attempt = judged(grade, {"data_source": "openai/gsm8k", "seen": "not the task's"})
    assert reported == [0.5] and attempt.reward == 0.5
    assert seen[0] == ("6", ["2 times 3?", "6"], (0,), {"data_source": "openai/gsm8k", "seen": []})


@pytest.mark.parametrize("form", ["sample", "whole", "step"])
def test_reward_in_any_form_is_one_number(form):
    async def grade(ctx):
        if form == "sample":
            ctx.set_sample_reward("main", 0.25)
        elif form == "whole":
            ctx.set_reward(0.25)
        else:
            ctx.set_step_reward(0, 0.25)

    reported, attempt = judged(grade)
    assert reported == [0.25] and len(attempt.grades) == 1


def test_grader_that_raises_is_reported_to_who_asked():
    async def grade(ctx):
        raise ValueError("no such answer")

    bench = Bench(None, grade)

    async def main():
        async with bench.opened() as (rollout,):
            with pytest.raises(GraderError, match="answer"):
                await bench.runner.compute_reward(rollout.id, SAID, {})
            with pytest.raises(GraderError, match="name"):
                await bench.runner.compute_reward("", SAID, {})
            with pytest.raises(PoolError):
                await bench.runner.compute_reward("nobody", SAID, {})

    asyncio.run(main())
