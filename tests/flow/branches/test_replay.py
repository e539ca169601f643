"""Branches of recorded rollouts: what is repeated, what is sampled, and what makes a branch void."""

import asyncio
import statistics
from dataclasses import replace

import pytest
from branch_cases import branching, choices, replies

from penstock.errors import PoolError
from penstock.records import End
from penstock.rollout.branches import calls_of, spread_calls
from penstock.train.sequences import exactness, read_graph, why_untrainable

MATTERS = 2
"""The call whose reply decides the reward."""


async def ask(ctx, messages, **options):
    client = ctx.openai().with_options(max_retries=0)
    made = await client.chat.completions.create(model="any", messages=messages, **options)
    return made.choices[0].message.content


async def four_calls(ctx):
    messages = list(ctx.prompt)
    for number in range(4):
        messages.append({"role": "assistant", "content": await ask(ctx, messages)})
        messages.append({"role": "user", "content": f"continue, {number}"})


async def third_is_left(ctx):
    ctx.set_reward(float(ctx.sample.replies[MATTERS]["content"] == "left"))


def test_branch_values_find_the_call_that_matters(renderer):
    async def main():
        script = choices("left", "right", seed=3)
        async with branching(renderer, script, four_calls, third_is_left, branches=10, concurrency=1) as stage:
            recorded = await stage.record()
            made = await stage.branch(recorded, 0, 1, 2, 3)
            assert {attempt.end for attempt in made} == {End.COMPLETED}
            values = [statistics.fmean(a.reward for a in made if a.ref.branch.step == step) for step in range(4)]
            gains = [after - before for before, after in zip(values, [*values[1:], recorded.reward], strict=True)]
            assert max(range(4), key=lambda step: abs(gains[step])) == MATTERS
            assert values[3] == recorded.reward and all(0.2 < value < 0.8 for value in values[:3])

    asyncio.run(main())


def test_branch_repeats_record_up_to_step_and_samples_from_there(renderer):
    async def main():
        async with branching(renderer, choices("left", "right"), four_calls, third_is_left, branches=8) as stage:
            recorded = await stage.record()
            asked = len(stage.engine.prompts)
            made = await stage.branch(recorded, 2)
            assert len(stage.engine.prompts) == asked + 8 * 2  # two calls of each were sampled, two came from the record
            for attempt in made:
                assert [step.replayed for step in attempt.steps] == [True, True, False, False]
                for step, before in zip(attempt.steps[:2], recorded.steps[:2], strict=True):
                    assert (step.message, step.completion_ids, step.logprobs) == (
                        before.message,
                        before.completion_ids,
                        before.logprobs,
                    )
                    assert (step.answer, step.created, step.context_digest) == (
                        before.answer,
                        before.created,
                        before.context_digest,
                    )
                assert attempt.nodes[:3] == tuple(
                    type(node)(**{**_fields(node), "rollout_id": attempt.ref.id}) for node in recorded.nodes[:3]
                )
                assert exactness(attempt).rate == 1.0
                graph = read_graph(attempt)
                assert [why_untrainable(step, graph) for step in attempt.steps] == ["replayed", "replayed", None, None]
            assert len({tuple(replies(attempt)[2:]) for attempt in made}) > 1

    asyncio.run(main())


def _fields(record):
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_different_request_is_located_and_voids_the_branch(renderer):
    runs = iter(range(100))

    async def forgetful(ctx):
        messages, number = list(ctx.prompt), next(runs)
        messages.append({"role": "assistant", "content": await ask(ctx, messages)})
        messages.append({"role": "user", "content": f"it is {number} oclock"})
        await ask(ctx, messages)

    async def main():
        async with branching(renderer, choices("left"), forgetful, third_is_left, branches=1) as stage:
            recorded = await stage.record()
            (made,) = await stage.branch(recorded, 1)
            assert (made.end, made.reward, len(made.steps)) == (End.BRANCH_DIVERGED, None, 1)
            asked = '{"choices":1,"messages":[{"content":"2 times 3?","role":"user"},{"content":"left","role":"assistant"},'
            at = len(asked) + len('{"content":"it is ')
            assert f"the request of step 1 differs from that of train-0.0.1 at byte {at}: recorded" in made.message
            assert "it is 0 o" in made.message and "it is 1 o" in made.message

    asyncio.run(main())


def test_agent_that_hides_refusal_is_void_anyway(renderer):
    runs = iter(range(100))

    async def stubborn(ctx):
        for text in (f"it is {next(runs)} oclock", "2 times 3?"):
            try:
                await ask(ctx, [{"role": "user", "content": text}])
            except Exception:
                continue

    async def good(ctx):
        ctx.set_reward(1.0)

    async def main():
        async with branching(renderer, choices("left"), stubborn, good, branches=1) as stage:
            recorded = await stage.record()
            (made,) = await stage.branch(recorded, 1)
            assert (made.end, made.reward) == (End.BRANCH_DIVERGED, None)
            assert recorded.reward == 1.0

    asyncio.run(main())


def test_a_program_that_ends_before_the_step_is_void(renderer):
    runs = iter(range(100))

    async def shorter(ctx):
        messages = list(ctx.prompt)
        for _ in range(3 if next(runs) == 0 else 2):
            messages.append({"role": "assistant", "content": await ask(ctx, messages)})
            messages.append({"role": "user", "content": "continue"})

    async def good(ctx):
        ctx.set_reward(1.0)

    async def main():
        async with branching(renderer, choices("left"), shorter, good, branches=1) as stage:
            recorded = await stage.record()
            (made,) = await stage.branch(recorded, 2)
            assert made.end is End.BRANCH_DIVERGED
            assert made.message == "its program ended without the call of step 2 of train-0.0.1"

    asyncio.run(main())


def test_concurrent_calls_may_be_reordered(renderer):
    runs = iter(range(100))

    async def talk(ctx, name, turns, turn_of):
        messages = [{"role": "user", "content": f"you are {name}"}]
        for number in range(turns):
            await turn_of(name, number)
            messages.append({"role": "assistant", "content": await ask(ctx, messages)})
            messages.append({"role": "user", "content": "continue"})

    async def pair(ctx):
        order = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
        if next(runs):
            order = [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
        done = asyncio.Condition()
        made = []

        async def turn_of(name, number):
            async with done:
                await done.wait_for(lambda: order[len(made)] == (name, number))
                made.append((name, number))
                done.notify_all()
            await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            group.create_task(talk(ctx, "a", 2, turn_of))
            group.create_task(talk(ctx, "b", 2, turn_of))

    async def good(ctx):
        ctx.set_reward(1.0)

    async def main():
        async with branching(renderer, choices("left", "right", "up", "down"), pair, good, branches=2) as stage:
            recorded = await stage.record()
            made = await stage.branch(recorded, 3)
            assert [attempt.end for attempt in made] == [End.COMPLETED] * 2
            for attempt in made:
                assert sum(step.replayed for step in attempt.steps) == 3

    asyncio.run(main())


def test_branches_of_an_unknown_rollout_or_step_are_refused(renderer):
    async def main():
        async with branching(renderer, choices("left"), four_calls, third_is_left, branches=1) as stage:
            recorded = await stage.record()
            (made,) = await stage.branch(recorded, 9)
            assert made.end is End.BRANCH_DIVERGED and "has no step 9" in made.message
            nobody = replace(recorded, ref=replace(recorded.ref, id="nobody"))
            with pytest.raises(ExceptionGroup) as caught:
                await stage.branch(nobody, 0)
            assert caught.group_contains(PoolError)

    asyncio.run(main())


def test_unfinished_branches_are_made_again(renderer):
    async def main():
        async with branching(renderer, choices("left", "right"), four_calls, third_is_left, branches=3) as stage:
            recorded = await stage.record()
            first = await stage.branch(recorded, 3)
            again = await stage.branch(recorded, 3)
            assert [attempt.ref.id for attempt in again] == [attempt.ref.id for attempt in first]
            assert again == first

    asyncio.run(main())


def test_calls_are_spread_over_a_long_rollout(renderer):
    async def main():
        async with branching(renderer, choices("left"), four_calls, third_is_left) as stage:
            recorded = await stage.record()
            assert calls_of(recorded) == [0, 1, 2, 3]
            assert spread_calls(recorded, 8) == [1, 2, 3]
            assert spread_calls(recorded, 2) == [1, 2]

    asyncio.run(main())
