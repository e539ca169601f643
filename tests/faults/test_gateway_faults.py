import asyncio
import itertools
import json
import socket
import sys
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from gateway_client import RETRY, USER, Client, GatedPool
from httpx2 import AsyncClient
from openai import APIError, AsyncOpenAI

from penstock.errors import ConfigError
from penstock.gateway import Gateway, GatewayLimits
from penstock.gateway.auth import GatewayTokens
from penstock.pool import POOLS
from penstock.records import End, Sampling, Task, make_rollout
from penstock.testing import ScriptedEngine, ScriptedReply, memory_pool, workbench, write_tokenizer


@asynccontextmanager
async def gateway(renderer, script, *, pool=None, **options):
    engine = ScriptedEngine(script, renderer.tokenizer)
    async with workbench(engine, renderer, pool=pool and pool(), **options) as bench:
        yield bench, await bench.rollout(), engine


def gated():
    return GatedPool(memory_pool())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_byte_waits_until_the_step_is_durable(renderer, stream):
    async with gateway(renderer, ["42."], pool=gated) as (bench, session, _):
        bench.pool.open.clear()
        client = Client(bench.gateway, session, stream=stream)
        await asyncio.wait_for(bench.pool.waiting.wait(), 10)
        assert b'finish_reason":"stop' not in client.body
        assert b"[DONE]" not in client.body
        assert stream or client.sent == []
        bench.pool.open.set()
        status, body = await client.answer()
        assert (status, b'finish_reason":"stop' in body, b"[DONE]" in body) == (200, True, stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_full_disk_stops_answers_until_space_returns(renderer, stream):
    async with gateway(renderer, ["42.", "42."], pool=gated) as (bench, session, _):
        bench.pool.full = True
        client = Client(bench.gateway, session, stream=stream)
        status, body = await client.answer()
        assert b"not_recorded" in body
        assert b"[DONE]" not in body
        if not stream:
            assert (status, client.headers[b"retry-after"], client.headers[b"x-should-retry"]) == (503, b"1", b"true")
        assert (await bench.attempt(session)).steps == ()
        bench.pool.full = False
        assert (await Client(bench.gateway, session, headers=[RETRY]).answer())[0] == 200
        assert [step.index for step in (await bench.attempt(session)).steps] == [0]


@pytest.mark.parametrize("stream", [False, True])
async def test_busy_engine_is_503_that_says_when_to_come_again(renderer, stream):
    async with gateway(renderer, [ScriptedReply(busy=True)]) as (bench, session, _):
        client = Client(bench.gateway, session, stream=stream)
        status, body = await client.answer()
        assert (status, client.headers[b"retry-after"]) == (503, b"1")
        assert json.loads(body)["error"]["code"] == "engine_busy"
        assert (await bench.attempt(session)).steps == ()


REPLY = "0123456789"


@pytest.mark.parametrize("fault", ["fail_after", "cut_after"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", range(11))
async def test_an_engine_that_breaks_off_leaves_a_step_marked_so(renderer, fault, stream, at):
    async with gateway(renderer, [ScriptedReply(REPLY, **{fault: at}), "42."]) as (bench, session, _):
        client = Client(bench.gateway, session, stream=stream)
        status, body = await client.answer()
        assert status == (200 if stream and at else 502)
        assert b"engine_error" in body
        assert b"[DONE]" not in body
        assert b'"finish_reason":"' not in body
        recorded = [(step.finish, step.message["content"]) for step in (await bench.attempt(session)).steps]
        assert recorded == ([("error", REPLY[:at])] if at else [])
        assert (await Client(bench.gateway, session).answer())[0] == 200


async def test_text_held_back_when_the_engine_stops_is_recorded_once(renderer):
    async with gateway(renderer, [ScriptedReply(ids=renderer.tokenizer.encode("so <tool_call> half"), finish="error")]) as (
        bench,
        session,
        _,
    ):
        tool = {"type": "function", "function": {"name": "f"}}
        status, _ = await Client(bench.gateway, session, tools=[tool]).answer()
        assert status == 502
        (step,) = (await bench.attempt(session)).steps
        assert (step.finish, step.message["content"]) == ("error", "so <tool_call> half")


async def test_concurrent_steps_are_numbered_one_by_one(renderer):
    async with gateway(renderer, lambda _: "42.", pool=gated) as (bench, session, engine):
        bench.pool.open.clear()
        clients = [Client(bench.gateway, session, n=2) for _ in range(5)]
        await asyncio.wait_for(engine.idle.wait(), 10)
        await asyncio.wait_for(bench.pool.waiting.wait(), 10)
        bench.pool.open.set()
        assert [(await client.answer())[0] for client in clients] == [200] * 5
        attempt = await bench.attempt(session)
        assert [step.index for step in attempt.steps] == list(range(10))
        assert len(attempt.nodes) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_caller_who_disconnects_frees_engine_and_leaves_cancelled_step(renderer, stream):
    async with gateway(renderer, [ScriptedReply(REPLY, stall_after=3)]) as (bench, session, engine):
        client = Client(bench.gateway, session, stream=stream)
        await asyncio.wait_for(engine.stalled.wait(), 10)
        client.hang_up()
        await asyncio.wait_for(client.task, 10)
        assert (engine.running, engine.cancelled) == (0, 1)
        (step,) = (await bench.attempt(session)).steps
        assert (step.finish, step.message["content"]) == ("cancelled", "012")


async def test_caller_who_disconnects_while_step_is_stored_loses_nothing(renderer):
    async with gateway(renderer, ["42."], pool=gated) as (bench, session, _):
        bench.pool.open.clear()
        client = Client(bench.gateway, session)
        await asyncio.wait_for(bench.pool.waiting.wait(), 10)
        client.hang_up()
        bench.pool.open.set()
        await asyncio.wait_for(client.task, 10)
        (step,) = (await bench.attempt(session)).steps
        assert step.finish == "stop"


async def test_many_callers_who_hang_up_leave_nothing_running(renderer):
    async with gateway(renderer, lambda _: ScriptedReply(REPLY, stall_after=3)) as (bench, session, engine):
        clients = [Client(bench.gateway, session, stream=bool(i % 2)) for i in range(100)]
        await asyncio.wait_for(engine.until_stalling(100), 20)
        for client in clients:
            client.hang_up()
        await asyncio.wait_for(engine.idle.wait(), 20)
        for client in clients:
            await asyncio.wait_for(client.task, 20)
        attempt = await bench.attempt(session)
        assert {step.finish for step in attempt.steps} == {"cancelled"}
        assert [step.index for step in attempt.steps] == list(range(100))
        assert len(attempt.nodes) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_a_rollout_ends_its_running_calls(renderer, stream):
    async with gateway(renderer, [ScriptedReply(REPLY, stall_after=3)]) as (bench, session, engine):
        client = Client(bench.gateway, session, stream=stream)
        await asyncio.wait_for(engine.stalled.wait(), 10)
        bench.gateway.close(session.rollout_id)
        status, body = await client.answer()
        assert (status, b"rollout_ended" in body, b"[DONE]" in body) == (200 if stream else 409, True, False)
        assert engine.running == 0
        assert (await bench.attempt(session)).steps[0].finish == "cancelled"


async def test_rollout_ended_during_sampling_gets_409_and_no_step(renderer):
    async with gateway(renderer, [ScriptedReply(REPLY, stall_after=3)]) as (bench, session, engine):
        client = Client(bench.gateway, session)
        await asyncio.wait_for(engine.stalled.wait(), 10)
        await bench.pool.end(session.rollout_id, End.TIMEOUT)
        engine.release()
        status, body = await client.answer()
        assert (status, b"rollout_ended" in body) == (409, True)
        assert (await bench.attempt(session)).steps == ()


async def test_one_choice_that_fails_fails_call_and_stops_others(renderer):
    async with gateway(
        renderer, [ScriptedReply(REPLY, stall_after=3), ScriptedReply(REPLY, fail_after=2), ScriptedReply(REPLY, stall_after=3)]
    ) as (bench, session, engine):
        status, body = await Client(bench.gateway, session, n=3).answer()
        assert (status, b"engine_error" in body) == (502, True)
        assert engine.running == 0
        assert {step.finish for step in (await bench.attempt(session)).steps} <= {"error", "cancelled", "stop"}


async def test_too_many_calls_at_once_are_refused(renderer):
    async with gateway(renderer, [ScriptedReply(REPLY, stall_after=1), "42."], limits=GatewayLimits(concurrent_calls=1)) as (
        bench,
        session,
        engine,
    ):
        first = Client(bench.gateway, session)
        await asyncio.wait_for(engine.stalled.wait(), 10)
        status, body = await Client(bench.gateway, session).answer()
        assert (status, b"too_many_calls" in body) == (429, True)
        engine.release()
        assert (await first.answer())[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_retry_of_answer_that_got_lost_gets_recorded_one(renderer, stream):
    async with gateway(renderer, ["one", "two"]) as (bench, session, engine):
        _, first = await Client(bench.gateway, session, stream=stream, n=2).answer()
        _, again = await Client(bench.gateway, session, stream=stream, n=2, headers=[RETRY]).answer()
        assert len((await bench.attempt(session)).steps) == 2
        assert len(engine.prompts) == 2
        assert bench.gateway.counts["replayed_call"] == 1
        assert said(again) == said(first) == {0: "one", 1: "two"}


def said(body):
    """Text by choice, whether streamed or not."""
    texts = {}
    if body.startswith(b"{"):
        return {choice["index"]: choice["message"]["content"] for choice in json.loads(body)["choices"]}
    for event in body.split(b"\n\n"):
        if event and not event.endswith(b"[DONE]"):
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return texts


async def test_a_retry_from_another_transcript_is_another_call(renderer):
    async with gateway(renderer, ["one", "two"]) as (bench, session, _):
        await Client(bench.gateway, session).answer()
        other = Client(bench.gateway, session, headers=[RETRY, (b"x-sample-id", b"planner")])
        assert b"two" in (await other.answer())[1]


async def test_same_call_again_that_is_not_retry_is_sampled_again(renderer):
    async with gateway(renderer, ["one", "two"]) as (bench, session, _):
        for text in (b"one", b"two"):
            assert text in (await Client(bench.gateway, session).answer())[1]


async def test_a_retry_after_a_refusal_is_sampled(renderer):
    async with gateway(renderer, ["one", ScriptedReply(busy=True), "three"]) as (bench, session, _):
        await Client(bench.gateway, session).answer()
        assert (await Client(bench.gateway, session).answer())[0] == 503
        assert b"three" in (await Client(bench.gateway, session, headers=[RETRY]).answer())[1]


async def test_retry_after_disconnect_is_sampled_since_reply_never_ended(renderer):
    async with gateway(renderer, [ScriptedReply(REPLY, stall_after=3), "two"]) as (bench, session, engine):
        client = Client(bench.gateway, session)
        await asyncio.wait_for(engine.stalled.wait(), 10)
        client.hang_up()
        await asyncio.wait_for(client.task, 10)
        assert b"two" in (await Client(bench.gateway, session, headers=[RETRY]).answer())[1]


def test_a_port_that_is_taken_is_one_clear_line(renderer):
    async def main():
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            gateway = Gateway(ScriptedEngine([], renderer.tokenizer), renderer, memory_pool(), secret=b"x" * 16, port=port)
            with pytest.raises(ConfigError, match=r"gateway\.port"):
                async with gateway:
                    pass

    asyncio.run(main())


def test_stopped_gateway_answers_its_calls_and_releases_its_port(renderer):
    async def main():
        engine, pool = ScriptedEngine([ScriptedReply(REPLY, stall_after=3)], renderer.tokenizer), memory_pool()
        rollout = make_rollout("train-0", "t", 0)
        await pool.open_group(Task(id="t", prompt=(USER,)), [rollout], seq=0)
        async with AsyncClient(trust_env=False) as http:
            async with Gateway(engine, renderer, pool, secret=b"x" * 16, limits=GatewayLimits(drain_s=0)) as gateway:
                session = gateway.open(rollout, Sampling())
                url, headers = f"{session.base_url}/chat/completions", {"x-api-key": session.token}
                call = asyncio.create_task(http.post(url, json={"messages": [USER]}, headers=headers))
                await asyncio.wait_for(engine.stalled.wait(), 10)
            assert (await call).status_code == 409
        assert engine.running == 0
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(url.split(":")[2].split("/")[0])))

    asyncio.run(main())


SECRET = b"a secret for tests only"
SERVER = f"""
import asyncio, sys
from pathlib import Path
from penstock.gateway import Gateway
from penstock.pool import POOLS
from penstock.records import Sampling
from penstock.chat.renderer import Renderer
from penstock.testing import ScriptedEngine

async def main(model, store):
    renderer, pool = Renderer.load(Path(model)), POOLS.load("sqlite")(Path(store))
    engine = ScriptedEngine(lambda prompt: f"reply to {{len(prompt)}} tokens", renderer.tokenizer)
    async with Gateway(engine, renderer, pool, secret={SECRET}, sampling={{"train": Sampling(max_tokens=1024)}}) as gateway:
        print(gateway.base_url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


class Talker:
    """An agent that continues until the gateway dies; each acknowledged reply is in its messages."""

    def __init__(self, name):
        self.messages = [{"role": "user", "content": name}]

    async def talk(self, base_url, token, enough):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            try:
                for said in itertools.count(1):
                    answer = await client.chat.completions.create(model="any", messages=self.messages)
                    self.messages += [{"role": "assistant", "content": answer.choices[0].message.content}, USER]
                    if said == 4:
                        enough.set()
            except APIError:
                return


async def serve_and_kill(folder, store, token, talkers):
    """Serve until some agent has got four replies, then kill in the midst of the work."""
    command = [sys.executable, "-c", SERVER, str(folder), str(store)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    base_url = (await asyncio.wait_for(server.stdout.readline(), 60)).decode().strip()
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for talker in talkers:
            group.create_task(talker.talk(base_url, token, enough))
        await asyncio.wait_for(enough.wait(), 60)
        server.kill()
    await server.wait()


async def with_pool(store, work):
    pool = POOLS.load("sqlite")(store)
    try:
        return await work(pool)
    finally:
        await pool.close()


@pytest.mark.slow
def test_killed_gateways_lose_no_acknowledged_step_and_next_one_continues(tmp_path):
    folder, store, rollout = write_tokenizer(tmp_path / "model"), tmp_path / "store", make_rollout("train-0", "t", 0)
    store.mkdir()
    talkers = [Talker(f"agent {number}") for number in range(3)]

    async def main():
        await with_pool(store, lambda pool: pool.open_group(Task(id="t", prompt=(USER,)), [rollout], seq=0))
        for _ in range(3):
            await serve_and_kill(folder, store, GatewayTokens(SECRET).model(rollout.id), talkers)
        return await with_pool(store, lambda pool: pool.rollout(rollout.id))

    attempt = asyncio.run(main())
    acknowledged = [m["content"] for talker in talkers for m in talker.messages if m["role"] == "assistant"]
    assert len(acknowledged) >= 12
    assert not Counter(acknowledged) - Counter(step.message["content"] for step in attempt.steps)
    assert [step.index for step in attempt.steps] == list(range(len(attempt.steps)))
    assert [node.parent is None for node in attempt.nodes].count(True) == 3
    assert all(node.reason is None for node in attempt.nodes)


@pytest.mark.parametrize("stream", [False, True])
async def test_callers_who_hang_up_over_sockets_free_the_engine(renderer, stream):
    async with gateway(renderer, [ScriptedReply("It is 42.", stall_after=2) for _ in range(50)], serves=True) as (
        _,
        session,
        engine,
    ):
        body = json.dumps({"messages": [USER], "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {session.token}\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        port = int(session.base_url.split(":")[2].split("/")[0])
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        for _, writer in lines:
            writer.write(head.encode() + body)
        await asyncio.wait_for(engine.until_stalling(50), 20)
        for number, (_, writer) in enumerate(lines):
            writer.transport.abort() if number % 2 else writer.close()
        await asyncio.wait_for(engine.idle.wait(), 5)
        assert engine.cancelled == 50
