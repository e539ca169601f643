"""Sessions of the OpenAI Agents SDK as transcripts of rollouts: kept apart and graded; nothing of the user's leaves the machine."""

import asyncio
import contextlib
import re

import pytest
from agents import RunConfig, Runner, trace
from agents.memory import Session
from agents.tracing import TracingProcessor, get_trace_provider
from doc_pages import page, titled_blocks
from gateway_cases import renderer
from openai import BadRequestError
from openai_agents_cases import DEADLINE_S, agent, agents_gateway, calls, multiply, run_in_rollout
from rollout_cases import TASK, make_agent

from penstock import AgentWorkflow, AgentWorkflowConfig, RolloutContext
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.integrations.openai_agents import RolloutSession
from penstock.records import End, Sampling, make_rollout
from penstock.rollout.runner import open_runner
from penstock.testing import ScriptedEngine, ScriptedReply, workbench

SECRET = "sk-the-users-own-key"


@pytest.fixture(autouse=True)
def _users_key(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, SECRET)


def outer_context(name="r1"):
    return RolloutContext(base_url="http://127.0.0.1:1/v1", api_key="token", rollout_id=name)


def run_of(agent_function, script, grade):
    """One rollout of a workflow through the runner on a real gateway; what the pool has of it."""

    async def main():
        engine = ScriptedEngine(script, renderer().tokenizer)
        made = make_agent(agent_function, grade, AgentWorkflowConfig(name="w"))
        async with asyncio.timeout(DEADLINE_S), workbench(engine, renderer(), serves=True) as bench:
            given = {"gateway": bench.gateway, "pool": bench.pool, "events": Events(), "limits": RolloutSection()}
            rollout = make_rollout("train-0", TASK.id, 0)
            await bench.pool.open_group(TASK, [rollout], seq=0)
            async with open_runner(made, **given) as runner:
                await runner.run(rollout, TASK, Sampling(max_tokens=200))
            return await bench.pool.rollout(rollout.id)

    return asyncio.run(main())


def test_fifty_rollouts_with_two_sessions_each_never_mix_their_calls():
    def script(prompt):
        who = re.search(r"I am (\S+)", prompt)[1]
        return f"to {who}" if "assistant\n<tool_call>" in prompt else calls("multiply", a=6, b=7)

    async def one(on, place):
        context = await on.rollout(f"train-{place}")
        with context:
            solver = agent(tools=[multiply])
            async with asyncio.TaskGroup() as group:
                for name in ("planner", "executor"):
                    group.create_task(Runner.run(solver, f"I am {place}/{name} .", session=RolloutSession(name)))
        return context

    async def main():
        async with agents_gateway(script) as on:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(on, place)) for place in range(50)]
            contexts = [task.result() for task in tasks]
            return [(await on.steps(each), await on.broken(each), await each.get_samples()) for each in contexts]

    for place, (steps, broken, samples) in enumerate(asyncio.run(main())):
        expected = [(name, f"to {place}/{name}") for name in ("executor", "planner")]
        assert (sorted(step for step in steps if step[1]), len(steps), broken) == (expected, 4, [])
        for name, sample in samples.items():
            assert sample.messages[-1]["content"][0]["text"] == f"to {place}/{name}"


def test_runner_grades_the_sessions_items_and_the_recorded_calls():
    async def work(ctx):
        await Runner.run(agent(tools=[multiply]), ctx.prompt, session=RolloutSession("solver"))

    async def grade(ctx):
        sample = ctx.sample
        assert (sample.id, sample.steps, [tool["function"]["name"] for tool in sample.tools]) == ("solver", (0, 1), ["multiply"])
        assert [message["role"] for message in sample.transcript] == ["system", "user", "assistant", "tool", "assistant"]
        assert sample.messages[0] == TASK.prompt[0] and sample.messages[-1]["role"] == "assistant"
        ctx.set_sample_reward("solver", 1.0)

    attempt = run_of(work, [calls("multiply", a=2, b=3), "6"], grade)
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 1.0)
    assert [node.reason for node in attempt.nodes] == [None, None]
    assert [node.parent for node in attempt.nodes] == [None, 0]


def test_workflow_that_forgets_the_session_ends_with_the_remedy():
    async def work(ctx):
        await Runner.run(agent(), ctx.prompt)

    attempt = run_of(work, [], lambda ctx: None)
    assert attempt.end is End.AGENT_ERROR
    assert "without a session" in attempt.message and "session=RolloutSession(name=…)" in attempt.message


@pytest.mark.parametrize("streamed", [False, True])
def test_failing_engine_ends_the_rollout_as_the_engines_fault(streamed):
    async def work(ctx):
        if streamed:
            async for _ in Runner.run_streamed(agent(), ctx.prompt, session=RolloutSession("s")).stream_events():
                pass
        else:
            await Runner.run(agent(), ctx.prompt, session=RolloutSession("s"))

    attempt = run_of(work, lambda _: ScriptedReply("long", fail_after=2), None)
    assert (attempt.end, attempt.reward) == (End.ENGINE_ERROR, None)


def test_session_is_registered_under_its_name_once():
    with outer_context() as context:
        session = RolloutSession(name="main")
        with pytest.raises(ValueError, match="main"):
            RolloutSession(name="main")
        nameless = RolloutSession()
    assert (session.name, session.session_id, list(context.sample_sources)) == ("main", "main", ["main", nameless.name])
    assert isinstance(session, Session) and re.fullmatch("[0-9a-f]{32}", nameless.name)


@pytest.mark.parametrize("origin", [contextlib.nullcontext(), outer_context("r1")])
def test_session_of_another_rollout_is_rejected(origin):
    with origin as context:
        session = RolloutSession("lost")
    where = "in rollout 'r1'" if context else "outside of any rollout"

    async def play(on, _):
        for use in (session.get_items(), session.add_items([]), session.pop_item(), session.clear_session()):
            with pytest.raises(RuntimeError, match=f"{where}"):
                await use
        with pytest.raises(RuntimeError, match="lost"):
            await Runner.run(agent(), "hi", session=session)
        return on.engine.prompts

    assert run_in_rollout([], play) == []


def test_agent_of_another_rollout_is_refused():
    with outer_context("r1"):
        stranger = agent()

    async def play(*_):
        with pytest.raises(RuntimeError, match="r1"):
            await Runner.run(stranger, "hi", session=RolloutSession())

    run_in_rollout([], play)


class Tracer(TracingProcessor):
    """Keeps what any exporter of the process would send."""

    def __init__(self):
        self.seen = []

    def on_trace_start(self, trace):
        self.seen.append(trace.name)

    def on_trace_end(self, trace):
        pass

    def on_span_start(self, span):
        self.seen.append(span.span_data.type)

    def on_span_end(self, span):
        pass

    def shutdown(self):
        pass

    def force_flush(self):
        pass


@pytest.fixture
def tracer():
    """The only processor, in place of the one that sends everything to OpenAI; on, whatever the environment says."""
    provider, tracer = get_trace_provider(), Tracer()
    processors, was_off = provider._multi_processor._processors, provider._manual_disabled
    provider.set_processors([tracer])
    provider.set_disabled(False)
    yield tracer
    provider.set_disabled(was_off)
    provider.set_processors(list(processors))


def test_rollout_traces_nothing_whoever_started_the_trace(tracer):
    async def play(on, context):
        with trace("the author's own"):
            await Runner.run(agent(tools=[multiply]), "hi", session=RolloutSession("a"))
        streamed = Runner.run_streamed(agent(), "hi", session=RolloutSession("b"), run_config=RunConfig(tracing_disabled=False))
        async for _ in streamed.stream_events():
            pass
        return await on.steps(context), context.direct_calls

    steps, direct_calls = run_in_rollout([calls("multiply", a=1, b=2), "done", "done"], play)
    assert (len(steps), tracer.seen, direct_calls) == (3, [], set())


def test_only_the_rollouts_own_key_and_names_are_sent():
    async def main():
        seen = bytearray()

        async def answer(reader, writer):
            seen.extend(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            await writer.drain()
            writer.close()

        async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            here = RolloutContext(base_url=f"http://127.0.0.1:{port}/v1", api_key="token", rollout_id="r9")
            with here, pytest.raises(BadRequestError):
                await Runner.run(agent(), "hi", session=RolloutSession("planner"))
        return seen.decode().lower()

    sent = asyncio.run(main())
    assert "x-rollout-id: r9\r\n" in sent and "x-sample-id: planner\r\n" in sent and "authorization: bearer token\r\n" in sent
    assert SECRET not in sent


GUIDE = titled_blocks(page("agents.md").partition("## Any client")[0], "OpenAI Agents", "python")
GUIDED = {
    "Multiply": ([calls("multiply", a=2, b=3), "It is 6."], {"solver"}),
    "PlanAndDo": (["one\ntwo", "done", "done"], {"planner", "executor-0", "executor-1"}),
    "Greet": (["Hello!"], {"main"}),
}


@pytest.mark.parametrize("place", range(len(GUIDED)))
def test_every_workflow_of_the_guide_runs(place):
    names = {}
    exec(GUIDE[place], names)
    (workflow,) = [
        each for each in names.values() if isinstance(each, type) and issubclass(each, AgentWorkflow) and each is not AgentWorkflow
    ]
    script, transcripts = GUIDED[workflow.__name__]
    graded = names["Exact"]().grade if "Exact" in names else good

    attempt = run_of(workflow().run, script, graded)
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 1.0)
    assert {step.transcript for step in attempt.steps} == transcripts
    assert len(GUIDE) == len(GUIDED)


async def good(ctx):
    ctx.set_reward(1.0)


def test_items_that_agent_adds_to_its_session_are_not_graded():
    claim = {"role": "assistant", "content": "It is 6."}

    async def work(ctx):
        session = RolloutSession("solver")
        await Runner.run(agent(), ctx.prompt, session=session)
        await session.add_items([claim])

    async def grade(ctx):
        assert ctx.sample.messages[-1] == {"role": "assistant", "content": "I do not know."}
        assert ctx.sample.reported_messages[-1] == claim
        ctx.set_reward(0.0)

    attempt = run_of(work, ["I do not know."], grade)
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 0.0)
