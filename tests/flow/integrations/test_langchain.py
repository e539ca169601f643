"""LangChain and LangGraph in rollouts: the real packages, a real gateway, replies that the tests write."""

import asyncio
import os

import pytest
from framework_cases import SECRETS, call, engine, outcome, sent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langsmith.utils import tracing_is_enabled
from pydantic import BaseModel

from penstock.integrations.langchain import chat_model
from penstock.records import End


class Answer(BaseModel):
    """The answer."""

    value: int


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


@tool
async def fail(a: int) -> str:
    """Fail at it."""
    raise ArithmeticError(f"cannot do {a}")


def solver(*tools, transcript="main", **settings):
    """A graph of two nodes, written by hand: the model and its tools, round and round."""
    model = chat_model(transcript, **settings).bind_tools(tools)

    async def think(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode(tools, handle_tool_errors=True))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


def test_graph_with_tools_is_one_recorded_path():
    async def run(ctx):
        graph = solver(multiply, temperature=0.5, max_tokens=64)
        state = await graph.ainvoke({"messages": ctx.prompt})
        await graph.ainvoke({"messages": [*state["messages"], HumanMessage("Sure?")]})

    done = outcome(["Let me see. " + call("multiply", a=6, b=7), "It is 42.", "Sure."], run)
    assert (done.end, done.breaks, done.transcripts) == (End.COMPLETED, [], ["main"] * 3)
    assert [message["role"] for message in done.samples["main"].messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    assert done.samples["main"].messages[3]["content"] == "42"
    assert {(each.temperature, each.max_tokens) for each in done.engine.samplings} == {(0.5, 64)}


def test_failing_tools_and_faulty_calls_continue_along_the_path():
    async def run(ctx):
        await solver(fail).ainvoke({"messages": ctx.prompt})

    faulty = '<tool_call>\n{"name": "fail", "arguments": {"a": 6, \n</tool_call>'
    done = outcome([call("fail", a=6), call("nothing"), faulty], run)
    assert (done.end, done.breaks, len(done.attempt.steps)) == (End.COMPLETED, [], 3)
    results = [message["content"] for message in done.samples["main"].messages if message["role"] == "tool"]
    assert "cannot do 6" in results[0] and "not a valid tool" in results[1]


@pytest.mark.parametrize("responses", [False, True])
def test_replies_stream_in_pieces_with_their_usage(responses):
    async def run(ctx):
        pieces = [piece async for piece in chat_model(use_responses_api=responses).astream(ctx.prompt)]
        texts = [piece.text for piece in pieces if piece.text]
        assert len(texts) > 3 and "".join(texts) == "It is 42, surely."
        assert [piece.usage_metadata["output_tokens"] > 0 for piece in pieces if piece.usage_metadata] == [True]

    assert outcome(["It is 42, surely."], run).message == ""


def test_several_transcripts_are_samples_of_their_own():
    async def run(ctx):
        async with asyncio.TaskGroup() as group:
            for name in "abcde":
                group.create_task(chat_model(name).ainvoke(f"I am {name}"))

    policy = engine()
    policy._next = lambda ids: policy.tokenizer.decode(ids).rpartition("I am ")[2][0]
    done = outcome(policy, run)
    assert {name: done.said(name)[-1] for name in done.samples} == {name: ("assistant", name) for name in "abcde"}


def test_structured_output_is_a_call_that_must_be_made():
    async def run(ctx):
        model = chat_model()
        assert await model.with_structured_output(Answer).ainvoke(ctx.prompt) == Answer(value=42)
        raw = await model.with_structured_output(Answer, include_raw=True).ainvoke(ctx.prompt)
        assert raw["parsed"] is None and raw["parsing_error"] is not None

    done = outcome(['{"value": 42}}\n</tool_call>', '{"value": "?"}}\n</tool_call>'], run)
    assert (done.end, done.message) == (End.COMPLETED, "")


def test_calls_from_threads_and_from_second_event_loop_are_recorded():
    async def run(ctx):
        model = chat_model()
        await asyncio.to_thread(model.invoke, ctx.prompt)
        await asyncio.to_thread(lambda: asyncio.run(model.ainvoke(ctx.prompt)))
        await asyncio.to_thread(lambda: list(model.stream(ctx.prompt)))
        await model.ainvoke(ctx.prompt)

    done = outcome(["1", "2", "3", "4"], run)
    assert (done.end, done.message, len(done.attempt.steps)) == (End.COMPLETED, "", 4)


def test_a_call_that_would_stop_the_event_loop_is_refused():
    async def run(ctx):
        solver_ = StateGraph(MessagesState)
        solver_.add_node("think", lambda state: {"messages": [chat_model().invoke(state["messages"])]})
        solver_.add_edge(START, "think")
        solver_.compile().invoke({"messages": ctx.prompt})

    done = outcome([], run)
    assert done.end is End.AGENT_ERROR and "would hold up the event loop" in done.message and "`ainvoke`" in done.message


def test_a_model_needs_a_rollout():
    with pytest.raises(RuntimeError, match=r"chat_model\(\)"):
        chat_model()


@pytest.mark.parametrize("taken", ["api_key", "base_url", "default_headers", "http_client", "openai_proxy"])
def test_settings_cannot_send_the_calls_elsewhere(taken):
    async def run(ctx):
        with pytest.raises(ValueError, match=f"{taken}"):
            chat_model(**{taken: "x"})
        assert isinstance(chat_model(model="any"), ChatOpenAI)

    assert "no model call" in outcome([], run).message


def test_environment_does_not_reach_the_policy(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-secret: leak")
    for name in ("OPENAI_API_BASE", "OPENAI_BASE_URL", "OPENAI_PROXY", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://leak.invalid/v1")
    before = dict(os.environ)

    async def both():
        model = chat_model("planner")
        with pytest.raises(Exception, match="400"):
            await model.ainvoke("Hello")
        await asyncio.to_thread(model.invoke, "Hello")

    request = sent(both)
    assert "leak" not in request and request.count("POST /v1/chat/completions") == 2
    assert all(request.count(reported) == 2 for reported in ("x-rollout-id: r-1", "x-sample-id: planner", "Bearer mk-own"))
    assert (dict(os.environ), tracing_is_enabled()) == (before, False)
