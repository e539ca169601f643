"""Contexts: where calls go, what a grader may set, and what it may not."""

import asyncio
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import AgentWorkflowContext, GraderContext, RolloutContext, get_rollout_context
from penstock.errors import ConfigError, GraderError
from penstock.sdk.context import RolloutSample, finite_reward


def context(name="r1"):
    return RolloutContext(base_url="http://127.0.0.1:1/v1", api_key=f"key-{name}", rollout_id=name)


def samples(*names):
    return {name: RolloutSample(id=name, messages=[]) for name in names}


def test_contexts_nest_and_the_outer_one_comes_back():
    with context("outer") as outer:
        with context("inner") as inner:
            assert get_rollout_context() is inner
        assert get_rollout_context() is outer
    assert get_rollout_context() is None


def test_parallel_tasks_each_see_their_own_context():
    async def one(name, together):
        with context(name):
            await together.wait()
            return await asyncio.to_thread(lambda: get_rollout_context().rollout_id)

    async def main():
        together = asyncio.Barrier(20)
        async with asyncio.TaskGroup() as group:
            tasks = {f"r{i}": group.create_task(one(f"r{i}", together)) for i in range(20)}
        assert {name: task.result() for name, task in tasks.items()} == {name: name for name in tasks}

    asyncio.run(main())


def test_openai_client_carries_the_rollouts_own_key_url_and_transcript(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own, which must not leave")
    ctx = AgentWorkflowContext(prompt=[])
    with context("r7"):
        client = ctx.openai("planner")
        assert (ctx.base_url, ctx.api_key) == ("http://127.0.0.1:1/v1", "key-r7")
    assert (client.api_key, str(client.base_url)) == ("key-r7", "http://127.0.0.1:1/v1/")
    assert client.default_headers["x-sample-id"] == "planner"
    assert client.default_headers["x-rollout-id"] == "r7"
    asyncio.run(client.close())


def test_clients_made_from_a_shared_one_use_its_connections():
    from openai import AsyncOpenAI

    shared = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1")
    first = RolloutContext(base_url="http://a/v1", api_key="k1", client=shared).openai()
    second = RolloutContext(base_url="http://b/v1", api_key="k2", client=shared).openai()
    assert first._client is second._client is shared._client
    assert (first.api_key, second.api_key) == ("k1", "k2")
    asyncio.run(shared.close())


@pytest.mark.parametrize("use", [lambda c: c.openai(), lambda c: c.base_url, lambda c: c.api_key])
def test_model_access_outside_a_rollout_says_how_to_run(use):
    with pytest.raises(ConfigError, match="inside a rollout only; run the workflow with"):
        use(AgentWorkflowContext(prompt=[]))


def test_grader_sets_rewards_by_transcript_and_for_the_whole():
    ctx = GraderContext(samples=samples("planner", "executor"))
    ctx.set_sample_reward("planner", 1)
    ctx.set_reward(0.25)
    assert (ctx.get_samples()["planner"].reward, ctx.samples["executor"].reward, ctx.reward) == (1.0, None, 0.25)


def test_unknown_transcript_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"unknown sample 'x'; this rollout has \['main'\]"):
        GraderContext(samples=samples("main")).set_sample_reward("x", 1.0)


def test_the_only_sample_is_at_hand_and_several_are_named():
    assert GraderContext(samples=samples("main")).sample.id == "main"
    with pytest.raises(GraderError, match=r"\['a', 'b'\]; use ctx.samples"):
        _ = GraderContext(samples=samples("b", "a")).sample


def test_grader_gets_its_own_copy_of_the_metadata():
    metadata = {"list": [1]}
    GraderContext(metadata=metadata).metadata["list"].append(2)
    assert metadata == {"list": [1]}


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None, "1.0", True, [1.0], 10**400, 1j])
def test_reward_that_is_no_finite_number_is_named(reward):
    with pytest.raises(GraderError, match="is not a finite number; give a finite float"):
        GraderContext(samples=samples("main")).set_sample_reward("main", reward)
    with pytest.raises(GraderError):
        GraderContext().set_reward(reward)


@given(st.floats() | st.integers() | st.fractions())
def test_finite_numbers_and_no_others_become_floats(number):
    if isinstance(number, float) and not math.isfinite(number):
        with pytest.raises(GraderError):
            finite_reward(number)
    else:
        assert finite_reward(number) == float(number)


def test_numpy_and_fraction_rewards_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert finite_reward(numpy.float32(0.5)) == finite_reward(Fraction(1, 2)) == 0.5
    assert type(finite_reward(numpy.int64(1))) is float
