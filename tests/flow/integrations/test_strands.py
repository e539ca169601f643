"""Strands agents in rollouts: the real package, a real gateway, replies that the tests write."""

import asyncio
from typing import Any

import pytest
from framework_cases import SECRETS, call, engine, outcome, sent
from opentelemetry import trace
from pydantic import BaseModel
from strands import tool
from strands.multiagent import GraphBuilder, Swarm

from penstock import AgentWorkflowConfig
from penstock.integrations.strands import RolloutAgent, RolloutModel, strands_messages
from penstock.records import End
from penstock.testing import ScriptedReply


class Answer(BaseModel):
    """The answer."""

    value: int


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


@tool
async def halve(a: int) -> str:
    """Halve a number."""
    await asyncio.sleep(0)
    return str(a // 2)


@tool
def fail(a: int) -> str:
    """Fail at it."""
    raise ArithmeticError(f"cannot do {a}")


class Settings(AgentWorkflowConfig):
    name: str = "settings"
    model: Any = RolloutModel(params={"temperature": 0.5, "top_k": 7})
    tools: Any = [multiply]  # noqa: RUF012


def make(name="solver", **settings):
    return RolloutAgent(name=name, **{"model": RolloutModel(), "callback_handler": None, **settings})


def contents(messages):
    return [(message["role"], message["content"]) for message in messages]


def test_tool_loop_is_one_path_and_sample_is_agents_history():
    async def run(ctx):
        agent = RolloutAgent(
            name="solver", model=ctx.config.model, tools=ctx.config.tools, messages=ctx.prompt, callback_handler=None
        )
        result = await agent.invoke_async()
        assert (result.stop_reason, result.metrics.accumulated_usage["outputTokens"] > 0) == ("end_turn", True)
        assert len(ctx.prompt) == 2

    done = outcome(["Let me see. " + call("multiply", a=6, b=7), "It is 42."], run, config=Settings())
    assert (done.end, done.breaks, done.transcripts) == (End.COMPLETED, [], ["solver", "solver"])
    system, user, use, result, last = contents(done.samples["solver"].messages)
    assert (system, user) == (("system", [{"text": "Be brief."}]), ("user", [{"text": "What is 6 times 7?"}]))
    assert (use[0], use[1][0], use[1][1]["toolUse"]["input"]) == ("assistant", {"text": "Let me see."}, {"a": 6, "b": 7})
    use_id = use[1][1]["toolUse"]["toolUseId"]
    assert result == ("user", [{"toolResult": {"toolUseId": use_id, "status": "success", "content": [{"text": "42"}]}}])
    assert last == ("assistant", [{"text": "It is 42."}])
    assert done.said("solver")[:2] == [("system", "Be brief."), ("user", "What is 6 times 7?")]
    assert done.samples["solver"].tools[0]["function"]["name"] == "multiply"
    assert {(each.temperature, each.top_k) for each in done.engine.samplings} == {(0.5, 7)}


def test_agent_continues_from_its_messages_however_it_is_called():
    async def run(ctx):
        agent = make(messages=ctx.prompt, system_prompt="Count.")
        await agent.invoke_async()
        await agent.invoke_async("Two?")
        async for _ in agent.stream_async([{"role": "user", "content": "Three?"}]):
            pass

    done = outcome(["one", "two", "three"], run)
    assert (done.end, done.breaks, len(done.attempt.nodes)) == (End.COMPLETED, [], 3)
    texts = [text for _, text in done.said("solver")]
    assert texts == ["Count.", "Be brief.", "What is 6 times 7?", "one", "Two?", "two", "Three?", "three"]


def test_replies_arrive_in_pieces_at_callback_and_in_stream():
    async def run(ctx):
        reported, streamed = [], []
        agent = make(messages=ctx.prompt, callback_handler=lambda **event: reported.append(event.get("data")))
        async for event in agent.stream_async():
            streamed.append(event.get("data"))
        pieces = [piece for piece in reported if piece]
        assert len(pieces) > 3 and "".join(pieces) == "It is 42, surely."
        assert pieces == [piece for piece in streamed if piece]

    assert outcome(["It is 42, surely."], run).message == ""


def test_tools_may_be_async_and_may_fail():
    async def run(ctx):
        await make(messages=ctx.prompt, tools=[halve, fail]).invoke_async()

    done = outcome([call("halve", a=84) + call("fail", a=1), "42"], run)
    results = [block["toolResult"] for block in done.samples["solver"].messages[3]["content"]]
    assert [(result["status"], result["content"][0]["text"][:30]) for result in results] == [
        ("success", "42"),
        ("error", "Error: ArithmeticError - canno"),
    ]
    assert (done.end, done.breaks) == (End.COMPLETED, [])


def test_structured_output_is_forced_on_the_same_path():
    async def run(ctx):
        agent = make(messages=ctx.prompt, tools=[multiply])
        result = await agent.invoke_async(structured_output_model=Answer)
        assert result.structured_output == Answer(value=42)

    done = outcome([call("multiply", a=6, b=7), "It is 42.", '{"value": 42}}\n</tool_call>'], run)
    assert (done.end, done.message, done.breaks) == (End.COMPLETED, "", [])


def test_calls_without_await_work_in_threads_and_in_tools():
    async def run(ctx):
        @tool
        def ask(question: str) -> str:
            """Ask a helper."""
            return str(make("helper")(question))

        await asyncio.to_thread(make(messages=ctx.prompt, tools=[ask]))

    done = outcome([call("ask", question="Well?"), "Well.", "Done."], run)
    assert (done.end, done.breaks, done.transcripts) == (End.COMPLETED, [], ["solver", "helper", "solver"])
    assert contents(done.samples["helper"].messages) == [("user", [{"text": "Well?"}]), ("assistant", [{"text": "Well."}])]


def test_a_call_that_would_stop_the_event_loop_is_refused():
    async def run(ctx):
        agent = make(messages=ctx.prompt)
        with pytest.raises(RuntimeError, match="invoke_async"):
            agent.structured_output(Answer)
        agent("Hello")

    done = outcome([], run)
    assert done.end is End.AGENT_ERROR and "use `await agent.invoke_async(…)`, or asyncio.to_thread" in done.message


def test_several_agents_of_a_rollout_are_samples_of_their_own():
    async def run(ctx):
        helper = make("helper", description="Helps.")
        planner, executor = make("planner", messages=ctx.prompt, tools=[helper]), make("executor", messages=ctx.prompt)
        plan = await planner.invoke_async()
        await executor.invoke_async(str(plan))

    done = outcome([call("helper", input="How?"), "So.", "Do so.", "Done."], run)
    assert (done.end, done.breaks) == (End.COMPLETED, [])
    assert list(done.samples) == ["planner", "helper", "executor"]
    assert done.said("executor")[2:] == [("user", "Do so.\n"), ("assistant", "Done.")]


def test_swarms_and_graphs_of_agents_are_recorded():
    async def run(ctx):
        await Swarm([make("planner"), make("executor")]).invoke_async("Go")
        graph = GraphBuilder()
        graph.add_node(make("first"), "first")
        graph.add_node(make("second"), "second")
        graph.add_edge("first", "second")
        graph.set_execution_timeout(20)
        await graph.build().invoke_async("Go")

    script = [call("handoff_to_agent", agent_name="executor", message="Yours"), "Handed over.", "Done.", "one", "two"]
    done = outcome(script, run)
    assert (done.end, done.message, done.breaks) == (End.COMPLETED, "", [])
    assert done.transcripts == ["planner", "planner", "executor", "first", "second"]


@pytest.mark.parametrize(
    ("faulty", "name", "arguments"),
    [
        ('{"name": "multiply", "arguments": {"a": 6, ', "multiply", '{"a": 6, '),
        ('{"name": "no such tool", "arguments": {"a": 6}}', "no such tool", '{"a": 6}'),
        ('{"name": "multiply", "arguments": {}}', "multiply", "{}"),
    ],
)
def test_a_faulty_tool_call_does_not_break_the_path(faulty, name, arguments):
    async def run(ctx):
        await make(messages=ctx.prompt, tools=[multiply]).invoke_async()

    done = outcome([f"<tool_call>\n{faulty}\n</tool_call>", "Sorry."], run)
    assert (done.end, done.breaks, len(done.attempt.steps)) == (End.COMPLETED, [], 2)
    reported = done.samples["solver"].transcript[2]["tool_calls"][0]["function"]
    assert reported["name"] == name and reported["arguments"].startswith(arguments)
    assert done.samples["solver"].messages[3]["content"][0]["toolResult"]["status"] == "error"


def test_a_failing_engine_is_not_the_agents_error():
    async def run(ctx):
        await make(messages=ctx.prompt).invoke_async()

    assert outcome([ScriptedReply("long", fail_after=2)], run).end is End.ENGINE_ERROR


def test_a_cancelled_agent_stops_the_engine():
    policy = engine(ScriptedReply("never ends", stall_after=2), "42")

    async def run(ctx):
        task = asyncio.create_task(make("first", messages=ctx.prompt).invoke_async())
        await policy.stalled.wait()
        task.cancel()
        await asyncio.wait({task})
        await policy.idle.wait()
        await make(messages=ctx.prompt).invoke_async()

    done = outcome(policy, run)
    assert (done.end, policy.cancelled) == (End.COMPLETED, 1)


def test_a_name_given_twice_ends_the_rollout_with_the_remedy():
    async def run(ctx):
        make()
        make()

    done = outcome([], run)
    assert done.end is End.AGENT_ERROR and "ValueError: sample 'solver' is registered already; give each" in done.message


def test_an_agent_for_the_policy_needs_a_rollout():
    with pytest.raises(RuntimeError, match="RolloutAgent"):
        make()


@pytest.mark.parametrize("taken", ["api_key", "base_url", "api_base", "extra_headers"])
def test_params_cannot_send_the_calls_elsewhere(taken):
    with pytest.raises(ValueError, match=f"{taken}"):
        RolloutModel(params={taken: "x", "temperature": 1.0})


def test_nothing_of_the_environment_reaches_the_policy(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-secret: leak")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://leak.invalid/v1")
    before = trace.get_tracer_provider()
    request = sent(lambda: make().invoke_async("Hello"))
    assert "leak" not in request
    assert "x-rollout-id: r-1" in request and "x-sample-id: solver" in request and "Bearer mk-own" in request
    assert trace.get_tracer_provider() is before


def test_messages_in_the_openai_form_become_blocks():
    calls = [{"id": str(n), "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}} for n in (1, 2)]
    rows = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "6?"}, {"text": "7?"}]},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Hm.", "refusal": None},
        {"role": "tool", "tool_call_id": "1", "name": "multiply", "content": "42"},
        {"role": "tool", "tool_call_id": "2", "content": "42"},
        {"role": "assistant", "content": "42"},
    ]
    system, user, use, results, last = strands_messages(rows)
    assert (system["role"], system["content"], user["content"]) == (
        "system",
        [{"text": "Be brief."}],
        [{"text": "6?"}, {"text": "7?"}],
    )
    assert use["content"][0] == {"reasoningContent": {"reasoningText": {"text": "Hm."}}}
    assert use["content"][1] == {"toolUse": {"toolUseId": "1", "name": "multiply", "input": {"a": 6}}}
    assert [block["toolResult"]["toolUseId"] for block in results["content"]] == ["1", "2"]
    assert (results["role"], last) == ("user", {"role": "assistant", "content": [{"text": "42"}]})
    assert strands_messages([user, use, results, last]) == [user, use, results, last]


def test_a_conversation_given_with_calls_and_results_reaches_the_policy():
    async def run(ctx):
        function = {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}
        before = [
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
        await make(messages=[*ctx.prompt, *before], tools=[multiply]).invoke_async()

    done = outcome(["It is 42."], run)
    assert [message["role"] for message in done.samples["solver"].transcript] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


@pytest.mark.parametrize(
    ("row", "reported"),
    [
        ({"role": "critic", "content": "x"}, r"messages\[0\] has role 'critic'; use system, developer, user"),
        ({"role": "user", "content": "x", "name": "bob"}, r"messages\[0\] has \['name'\], which Strands cannot hold"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content of type \['image_url'\]; give text"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]},
            "calls 'f' with arguments that are no JSON",
        ),
    ],
)
def test_messages_that_would_lose_something_are_refused(row, reported):
    with pytest.raises(ValueError, match=reported):
        strands_messages([row])


def test_words_that_agent_puts_into_its_history_are_not_graded():
    async def run(ctx):
        agent = make(messages=ctx.prompt)
        await agent.invoke_async()
        agent.messages.append({"role": "assistant", "content": [{"text": "42"}]})

    sample = outcome(["I do not know."], run).samples["solver"]
    assert sample.messages == sample.transcript and sample.messages[-1]["content"] == "I do not know."
    assert sample.reported_messages[-1]["content"] == [{"text": "42"}]
