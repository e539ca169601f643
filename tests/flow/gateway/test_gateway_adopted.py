"""Rollouts that this process did not open: what is kept of them is bounded, and read from the pool again."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from gateway_cases import USER, chat, messages_of, renderer
from gateway_flow_cases import generate, open_gateway

from penstock.gateway import Gateway
from penstock.gateway import session as sessions_module
from penstock.records import End, Sampling, Task, make_rollout
from penstock.testing import GatewayFixture, ScriptedEngine, memory_pool


@pytest.fixture
def little_room(monkeypatch):
    """Room for few sessions. A test cannot fill what a gateway has."""
    monkeypatch.setattr(sessions_module, "MAX_ADOPTED_BYTES", 40_000)


def hi(prompt):
    return "Hi."


async def test_many_rollouts_stay_within_the_bound(little_room):
    async with open_gateway(hi) as (http, bench, _):
        sessions = bench.gateway._sessions
        for number in range(60):
            await generate(http, f"t{number}", {"role": "user", "content": f"{number}?" * 10})
            assert sessions._adopted_bytes == sum(each.weight for each in sessions._adopted.values()) <= 40_000
        assert 1 < len(sessions) < 10


async def test_dropped_rollout_continues_from_the_pool(little_room):
    async with open_gateway(hi) as (http, bench, _):
        sessions = bench.gateway._sessions
        first = await generate(http, "t0")
        sessions.resample(await sessions.get("t0"), Sampling(temperature=0.25))
        for number in range(1, 30):
            await generate(http, f"t{number}")
        assert "t0" not in sessions._adopted
        reply = {"role": "assistant", "content": first["response_text"]}
        second = await generate(http, "t0", USER, reply, {"role": "user", "content": "And?"})
        assert second["step_index"] == 1
        assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
        assert [node.parent for node in (await bench.pool.rollout("t0")).nodes] == [None, 0]
        assert (await sessions.get("t0")).sampling.temperature == 0.25


async def test_dropped_session_in_use_is_found_again(little_room):
    async with open_gateway(hi) as (http, bench, _):
        sessions = bench.gateway._sessions
        await generate(http, "t0")
        used = await sessions.get("t0")
        for number in range(1, 30):
            await generate(http, f"t{number}")
        assert "t0" not in sessions._adopted
        assert await sessions.get("t0") is used
        for number in range(30, 60):
            await generate(http, f"t{number}")
        sessions.close_all()
        assert used.closed


async def test_refused_request_is_not_kept():
    async with open_gateway(hi, engine={"context_length": 4096}) as (http, bench, _):
        await generate(http, "t0")
        session = await bench.gateway._sessions.get("t0")
        before = session.weight
        long = [{"role": "user", "content": "x" * 30_000}, {"role": "user", "content": 7}]
        wrong = await http.post("/generate", json={"trajectory_uid": "t0", "prompt_uid": "p1", "messages": long})
        too_long = await http.post("/t0/p1/v1/chat/completions", json={"model": "m", "messages": [long[0]] * 40})
        assert (wrong.status_code, too_long.status_code) == (422, 400), (wrong.text, too_long.text)
        assert session.weight <= before


async def test_two_gateways_share_a_rollout_by_retries():
    engine, pool = ScriptedEngine(hi, renderer().tokenizer), memory_pool()
    rollout, retry = make_rollout("g", "t", 0), {"x-stainless-retry-count": "1"}
    await pool.open_group(Task(id="t", prompt=()), [rollout], seq=0)
    async with asyncio.timeout(60), AsyncExitStack() as clients:
        gateways = [Gateway(engine, renderer(), pool, secret=b"a secret for tests only") for _ in range(2)]
        one, other = [GatewayFixture(each, pool, False, clients).http(each.tokens.model(rollout.id)) for each in gateways]
        first = await chat(one, USER)
        assert (await chat(other, USER, headers=retry)).content == first.content
        talk = [USER, messages_of(first)[0], USER]
        second = await chat(one, *talk)
        assert (await chat(other, *talk)).status_code == 503
        assert (await chat(other, *talk, headers=retry)).status_code == 200
        await pool.end(rollout.id, End.COMPLETED)
        assert (await chat(one, *talk, messages_of(second)[0], USER)).status_code == 409
        assert [node.parent for node in (await pool.rollout(rollout.id)).nodes] == [None, 0]
    await pool.close()
