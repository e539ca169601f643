"""`ctx.openai()` and `ctx.anthropic()` of an agent in the gateway's event loop: answers as over a socket, and none is opened."""

import asyncio
import socket
from contextlib import asynccontextmanager
from functools import wraps

import anthropic
import openai
import pytest
from gateway_cases import USER, renderer

from penstock.sdk.clients import Clients
from penstock.sdk.routing import RolloutContext
from penstock.testing import ScriptedEngine, ScriptedReply, workbench

CALL = {"model": "any", "messages": [USER], "max_tokens": 40}


def in_loop(test):
    """Runs an asynchronous test."""

    @wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


@asynccontextmanager
async def agent_of(*replies: ScriptedReply):
    """The engine, the gateway, and the context of an agent that runs next to it."""
    engine = ScriptedEngine(list(replies), renderer().tokenizer)
    async with asyncio.timeout(60), workbench(engine, renderer(), serves=True) as bench:
        session = await bench.rollout()
        clients = Clients(bench.gateway.app)
        try:
            yield engine, bench, RolloutContext(base_url=session.base_url, api_key=session.token, clients=clients)
        finally:
            await clients.close()


@pytest.fixture
def no_sockets(monkeypatch):
    """The addresses that anything connects to."""
    connected = []
    plain = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: (connected.append(address), plain(self, address))[1])
    monkeypatch.setattr(asyncio.BaseEventLoop, "sock_connect", lambda self, sock, address: connected.append(address), raising=False)
    return connected


@in_loop
async def test_answers_are_those_of_gateway_and_no_socket_is_opened(no_sockets):
    async with agent_of(ScriptedReply("The answer is 42."), ScriptedReply("It is 42."), ScriptedReply("42")) as (_, bench, context):
        whole = await context.openai().chat.completions.create(**CALL)
        assert whole.choices[0].message.content == "The answer is 42."
        streamed = await context.openai().chat.completions.create(**CALL, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in streamed if chunk.choices]
        assert "".join(parts) == "It is 42." and len(parts) > 3  # as it comes, not at the end
        message = await context.anthropic().messages.create(**CALL)
        assert message.content[0].text == "42"
        attempt = await bench.pool.rollout("train-0.0.1")
        assert [step.message["content"] for step in attempt.steps] == ["The answer is 42.", "It is 42.", "42"]
    assert not no_sockets


@in_loop
async def test_refusals_are_the_vendors_errors():
    async with agent_of() as (_, _bench, context):
        with pytest.raises(openai.BadRequestError, match="messages"):
            await context.openai().chat.completions.create(model="any", messages=[])
        with pytest.raises(anthropic.AuthenticationError):
            stranger = RolloutContext(base_url=context.base_url, api_key="wrong", clients=context.clients)
            await stranger.anthropic().messages.create(**CALL)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@in_loop
async def test_caller_that_leaves_ends_its_call_on_the_engine(stream):
    async with agent_of(ScriptedReply("The answer is 42.", stall_after=3)) as (engine, bench, context):
        call = asyncio.create_task(read(context, stream=stream))
        await engine.stalled.wait()
        call.cancel()
        await asyncio.wait({call})
        await engine.idle.wait()
        assert engine.cancelled == 1
        attempt = await bench.pool.rollout("train-0.0.1")
        assert [(step.finish, len(step.completion_ids)) for step in attempt.steps] in ([("cancelled", 3)], [])


async def read(context: RolloutContext, *, stream: bool) -> None:
    answer = await context.openai().chat.completions.create(**CALL, stream=stream)
    if stream:
        async for _ in answer:
            pass


@in_loop
async def test_the_callers_own_timeout_counts():
    async with agent_of(*[ScriptedReply("The answer is 42.", stall_after=0)] * 3) as (engine, _bench, context):
        hasty = context.openai().with_options(timeout=0.2, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            await hasty.chat.completions.create(**CALL)
        await engine.idle.wait()
        assert engine.cancelled == 1


@in_loop
async def test_engine_that_fails_in_middle_of_stream_is_reported():
    async with agent_of(ScriptedReply("The answer is 42.", fail_after=3)) as (_, _bench, context):
        with pytest.raises(openai.APIError, match="failed"):
            await read(context, stream=True)


@pytest.mark.parametrize("begun", [False, True], ids=["at once", "after the head of its answer"])
@in_loop
async def test_gateway_that_breaks_is_an_error_of_the_server(caplog, begun):
    async def broken(scope, receive, send):
        await receive()
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"900")]})
        raise RuntimeError("a bug")

    context = RolloutContext(base_url="http://gateway/v1", api_key="any", clients=Clients(broken))
    with pytest.raises(openai.InternalServerError, match="failed"):
        await context.openai().with_options(max_retries=0).chat.completions.create(**CALL)
    assert "a bug" in caplog.text


@in_loop
async def test_gateway_that_stops_reports_it():
    async def stopping(scope, receive, send):
        asyncio.current_task().cancel()
        await receive()
        await asyncio.sleep(0)

    context = RolloutContext(base_url="http://gateway/v1", api_key="any", clients=Clients(stopping))
    with pytest.raises(openai.InternalServerError, match="stopping") as refused:
        await context.openai().with_options(max_retries=0).chat.completions.create(**CALL)
    assert refused.value.status_code == 503


@in_loop
async def test_other_event_loops_call_over_a_socket():
    async with agent_of(ScriptedReply("The answer is 42.")) as (_, _bench, context):
        client = context.openai()  # made in the gateway's loop, used in another

        def in_thread() -> str:
            answer = asyncio.run(client.chat.completions.create(**CALL))
            return answer.choices[0].message.content

        assert await asyncio.to_thread(in_thread) == "The answer is 42."
