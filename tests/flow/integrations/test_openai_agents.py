"""The OpenAI Agents SDK inside rollouts: whose call is whose, what is recorded, what the grader sees, what is refused."""

import asyncio
import itertools

import pytest
from agents import (
    Agent,
    ModelSettings,
    RunConfig,
    Runner,
    function_tool,
)
from openai_agents_cases import TWICE, agent, calls, multiply, run_in_rollout
from pydantic import BaseModel

from penstock.integrations.openai_agents import RolloutModel, RolloutSession

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 times 7?"}]


def test_tool_loop_is_one_transcript_whose_tokens_continue():
    async def play(on, context):
        session = RolloutSession(name="solver")
        result = await Runner.run(agent(tools=[multiply]), PROMPT, session=session)
        samples = await context.get_samples()
        return result, await on.steps(context), await on.broken(context), samples["solver"].messages, len(on.engine.prompts)

    result, steps, broken, items, _ = run_in_rollout([calls("multiply", a=6, b=7), "42"], play)
    assert (result.final_output, [name for name, _ in steps], broken) == ("42", ["solver", "solver"], [])
    assert items[:2] == PROMPT
    assert [item.get("type") for item in items[2:]] == ["function_call", "function_call_output", "message"]
    assert (items[2]["name"], items[2]["arguments"], items[3]["output"]) == ("multiply", '{"a": 6, "b": 7}', "42")
    assert (items[4]["role"], items[4]["content"][0]["type"], items[4]["content"][0]["text"]) == ("assistant", "output_text", "42")
    assert all(type(item) is dict for item in items)


@pytest.mark.parametrize("streamed", [False, True])
def test_reply_with_text_and_two_calls_continues_with_tokens(streamed):
    async def play(on, context):
        solver, session = agent(tools=[multiply]), RolloutSession("s")
        if streamed:
            result = Runner.run_streamed(solver, "go", session=session)
            async for _ in result.stream_events():
                pass
        else:
            await Runner.run(solver, "go", session=session)
        await Runner.run(solver, "and again?", session=session)
        return await on.broken(context), len(await on.steps(context)), on.prompt(1)

    both = f"Let me see.\n{calls('multiply', a=6, b=7)}\n{calls('multiply', a=2, b=3)}"
    broken, count, prompt = run_in_rollout([both, "42 and 6", "yes"], play)
    assert (broken, count, both in prompt) == ([], 3, True)


def test_repeated_runs_on_one_session_carry_history_and_tokens():
    async def play(on, context):
        session, solver = RolloutSession("talk"), agent()
        for text in ("one", "two", "three"):
            await Runner.run(solver, text, session=session)
        return await on.steps(context), await on.broken(context), on.engine.prompts

    steps, broken, prompts = run_in_rollout(["A", "B", "C"], play)
    assert (steps, broken) == ([("talk", "A"), ("talk", "B"), ("talk", "C")], [])
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(prompts))


def test_streamed_run_gives_text_as_it_comes_and_counts_usage():
    async def play(on, context):
        result = Runner.run_streamed(agent(tools=[multiply]), "6 times 7?", session=RolloutSession("s"))
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return deltas, result, await on.steps(context), await on.broken(context)

    deltas, result, steps, broken = run_in_rollout([calls("multiply", a=6, b=7), "It is 42."], play)
    assert ("".join(deltas), result.final_output, len(deltas) > 1) == ("It is 42.", "It is 42.", True)
    assert ([name for name, _ in steps], broken) == (["s", "s"], [])
    assert (result.context_wrapper.usage.requests, result.context_wrapper.usage.output_tokens > 0) == (2, True)


def test_abandoned_stream_stops_the_engine():
    async def play(on, context):
        session, solver = RolloutSession("s"), agent()
        result = Runner.run_streamed(solver, "continue", session=session)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                result.cancel()
        await on.engine.idle.wait()
        return await Runner.run(solver, "again", session=RolloutSession("t")), on.engine.cancelled

    result, cancelled = run_in_rollout(["word " * 5000, "fine"], play)
    assert (result.final_output, cancelled) == ("fine", 1)


@TWICE
def test_run_sync_in_a_thread_belongs_to_the_rollout():
    async def play(on, context):
        solver, session = agent(tools=[multiply]), RolloutSession("sync")

        def work():
            try:
                return [Runner.run_sync(solver, text, session=session).final_output for text in ("a", "b")]
            finally:
                asyncio.get_event_loop_policy().get_event_loop().close()

        return await asyncio.to_thread(work), await on.steps(context), await on.broken(context)

    outputs, steps, broken = run_in_rollout([calls("multiply", a=2, b=3), "6", "7"], play)
    assert (outputs, [name for name, _ in steps], broken) == (["6", "7"], ["sync"] * 3, [])


def test_handoff_stays_in_the_session_with_the_other_agents_instructions():
    async def play(on, context):
        expert = agent("expert", handoff_description="Knows more.")
        first = agent("first", handoffs=[expert])
        result = await Runner.run(first, "Hard question", session=RolloutSession("talk"))
        return result, await on.steps(context), on.prompt(1), (await context.get_samples())["talk"].messages

    result, steps, prompt, items = run_in_rollout([calls("transfer_to_expert"), "Easy."], play)
    assert (result.last_agent.name, [name for name, _ in steps]) == ("expert", ["talk", "talk"])
    assert "You are expert." in prompt and "You are first." not in prompt
    assert [item.get("type") for item in items] == [None, "function_call", "function_call_output", "message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_agent_as_tool_belongs_to_run_that_calls_it(streamed):
    seen = []
    options = {"on_stream": lambda event: seen.append(event["event"].type)} if streamed else {}

    async def play(on, context):
        helper = agent("helper").as_tool("ask_helper", "Ask for help.", **options)
        result = await Runner.run(agent("boss", tools=[helper]), "Do it", session=RolloutSession("boss"))
        return result.final_output, await on.steps(context), await on.broken(context), await context.get_samples()

    output, steps, broken, samples = run_in_rollout([calls("ask_helper", input="how?"), "like this", "done"], play)
    assert (output, [name for name, _ in steps], steps[1][1], broken) == ("done", ["boss"] * 3, "like this", [])
    assert list(samples) == ["boss"] and "like this" in str(samples["boss"].messages)
    assert bool(seen) is streamed


def test_agent_as_a_tool_with_a_session_is_a_transcript():
    async def play(on, context):
        helper = agent("helper").as_tool("ask_helper", "Ask for help.", session=RolloutSession("helper"))
        await Runner.run(agent("boss", tools=[helper]), "Do it", session=RolloutSession("boss"))
        return await on.steps(context)

    steps = run_in_rollout([calls("ask_helper", input="how?"), "like this", "done"], play)
    assert [name for name, _ in steps] == ["boss", "helper", "boss"]


def test_agent_in_a_tool_thread_belongs_to_the_run():
    async def play(on, context):
        helper = agent("helper")

        @function_tool
        def ask() -> str:
            """Ask for help."""
            return asyncio.run(Runner.run(helper, "how?")).final_output

        await Runner.run(agent("boss", tools=[ask]), "Do it", session=RolloutSession("boss"))
        return await on.steps(context)

    assert [name for name, _ in run_in_rollout([calls("ask"), "like this", "done"], play)] == ["boss"] * 3


@pytest.mark.parametrize("config", [RunConfig, dict])
def test_placeholder_in_the_run_config_covers_every_agent(config):
    async def play(on, context):
        plain = Agent(name="plain", handoffs=[Agent(name="other", model="gpt-5")])
        given = config(model=RolloutModel(), workflow_name="kept")
        result = await Runner.run(plain, "hi", session=RolloutSession("s"), run_config=given)
        return result.final_output, await on.steps(context), given

    output, steps, given = run_in_rollout([calls("transfer_to_other"), "yes"], play)
    assert (output, [name for name, _ in steps]) == ("yes", ["s", "s"])
    assert isinstance(given["model"] if isinstance(given, dict) else given.model, RolloutModel)


def test_settings_reach_the_engine_and_the_agents_own_win():
    async def play(on, _):
        model = RolloutModel(temperature=0.25, top_p=0.5)
        await Runner.run(agent(model=model), "hi", session=RolloutSession("a"))
        own = agent(model=model, model_settings=ModelSettings(temperature=0.75, max_tokens=9))
        await Runner.run(own, "hi", session=RolloutSession("b"))
        return [(each.temperature, each.top_p) for each in on.engine.samplings], on.engine.samplings[1].max_tokens

    assert run_in_rollout(["a", "b"], play) == ([(0.25, 0.5), (0.75, 0.5)], 9)
    with pytest.raises(TypeError, match="ModelSettings"):
        RolloutModel(base_url="http://elsewhere")


class Answer(BaseModel):
    value: int


@pytest.mark.parametrize("streamed", [False, True])
def test_output_type_is_asked_for_in_the_instructions_and_parsed(streamed):
    async def play(on, context):
        solver, session = agent(output_type=Answer, tools=[multiply]), RolloutSession("s")
        if streamed:
            result = Runner.run_streamed(solver, "6 times 7?", session=session)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(solver, "6 times 7?", session=session)
        return result.final_output, on.prompt(0), await on.broken(context)

    output, prompt, broken = run_in_rollout([calls("multiply", a=6, b=7), '{"value": 42}'], play)
    assert (output, broken) == (Answer(value=42), [])
    assert "You are solver.\n\nYour final answer must be JSON" in prompt and '"value"' in prompt


def test_instructions_are_sent_and_not_kept_and_usage_is_counted():
    async def play(on, _):
        session = RolloutSession()
        result = await Runner.run(agent(), PROMPT, session=session)
        return on.prompt(0), await session.get_items(), result.context_wrapper.usage, len(on.engine.prompts[0])

    prompt, items, usage, tokens = run_in_rollout(["42"], play)
    assert prompt.index("You are solver.") < prompt.index("Be brief.")
    assert "You are solver." not in str(items)
    assert (usage.requests, usage.input_tokens, usage.output_tokens > 0) == (1, tokens, True)
