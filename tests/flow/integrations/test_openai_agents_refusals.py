"""What the OpenAI Agents integration refuses: calls that belong to no session, agents and placeholders outside of their rollout."""

import asyncio

import pytest
from agents import Agent, ModelSettings, Runner, SQLiteSession, function_tool
from openai import BadRequestError
from openai_agents_cases import TWICE, agent, calls, run_in_rollout

from penstock.integrations.openai_agents import RolloutAgent, RolloutModel, RolloutSession
from penstock.testing import ScriptedReply


async def attempt_without(way):
    """A run of a fresh agent that has no session."""
    if way == "run":
        await Runner.run(agent(), "hi")
    else:
        async for _ in Runner.run_streamed(agent(), "hi").stream_events():
            pass


@pytest.mark.parametrize("way", ["run", "run_streamed"])
def test_run_without_a_session_is_rejected(way):
    async def play(on, context):
        for place in range(2):
            with pytest.raises(RuntimeError, match=r"session=RolloutSession\(name"):
                await attempt_without(way)
            await Runner.run(agent(), "hi", session=RolloutSession(f"s{place}"))
            streamed = Runner.run_streamed(agent(), "hi", session=RolloutSession(f"t{place}"))
            async for _ in streamed.stream_events():
                pass
        with pytest.raises(RuntimeError, match="session"):
            await attempt_without(way)
        return await on.steps(context)

    assert [name for name, _ in run_in_rollout(["a"] * 4, play)] == ["s0", "t0", "s1", "t1"]


@TWICE
def test_run_sync_without_a_session_is_rejected():
    async def play(on, context):
        def work():
            try:
                Runner.run_sync(agent(), "hi", session=RolloutSession("s"))
                with pytest.raises(RuntimeError, match="session"):
                    Runner.run_sync(agent(), "hi")
            finally:
                asyncio.get_event_loop_policy().get_event_loop().close()

        await asyncio.to_thread(work)
        return await on.steps(context)

    assert run_in_rollout(["a"], play) == [("s", "a")]


def test_task_that_outlives_its_run_is_refused():
    async def play(on, context):
        over, left = asyncio.Event(), []

        async def late():
            await over.wait()
            return await Runner.run(agent("late"), "hi")

        @function_tool
        async def start() -> str:
            """Start something that continues."""
            left.append(asyncio.create_task(late()))
            return "started"

        await Runner.run(agent(tools=[start]), "hi", session=RolloutSession("s"))
        over.set()
        with pytest.raises(RuntimeError, match="session"):
            await left[0]
        return await on.steps(context)

    assert len(run_in_rollout([calls("start"), "ok"], play)) == 2


def test_session_of_another_kind_is_refused():
    async def play(_, __):
        with pytest.raises(RuntimeError, match="session=RolloutSession"):
            await Runner.run(agent(), "hi", session=SQLiteSession("mine"))

    run_in_rollout([], play)


def test_run_that_fails_or_is_cancelled_leaves_no_session_behind():
    async def play(on, context):
        with pytest.raises(BadRequestError):
            await Runner.run(agent(model_settings=ModelSettings(temperature=-1)), "hi", session=RolloutSession("a"))
        with pytest.raises(RuntimeError, match="session"):
            await Runner.run(agent(), "hi")
        slow = asyncio.create_task(Runner.run(agent(), "hi", session=RolloutSession("b")))
        await on.engine.stalled.wait()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        with pytest.raises(RuntimeError, match="session"):
            await Runner.run(agent(), "hi")
        await on.engine.idle.wait()

    run_in_rollout([ScriptedReply("never ends", stall_after=2)], play)


def test_placeholder_cannot_be_called():
    async def play(*_):
        with pytest.raises(NotImplementedError, match=r"RolloutAgent\(model=RolloutModel\(\)\)"):
            await Runner.run(Agent(name="plain", model=RolloutModel()), "hi", session=RolloutSession())

    run_in_rollout([], play)


def test_agent_with_placeholder_needs_rollout_and_one_without_does_not():
    with pytest.raises(RuntimeError, match="RolloutContext"):
        agent()
    plain = RolloutAgent(name="judge", model="gpt-5")
    assert (plain.model, RolloutAgent(name="x").model) == ("gpt-5", None)
