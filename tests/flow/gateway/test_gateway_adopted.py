"""Rollouts that this process did not open: what is kept of them is bounded by its weight, and read from the pool again."""

import asyncio

import pytest
from gateway_cases import USER
from gateway_flow_cases import generate, opened, run_open

from penstock.gateway import session as sessions_module
from penstock.records import Sampling


@pytest.fixture
def little_room(monkeypatch):
    """Room for few sessions. A test cannot fill what a gateway has."""
    monkeypatch.setattr(sessions_module, "MAX_ADOPTED_BYTES", 40_000)


def test_many_rollouts_take_no_more_than_the_bound(little_room):
    async def steps(http, bench, engine):
        sessions = bench.gateway._sessions
        for number in range(60):
            await generate(http, f"t{number}", {"role": "user", "content": f"{number}?" * 10})
            assert sessions._adopted_bytes == sum(each.weight for each in sessions._adopted.values()) <= 40_000
        assert 1 < len(sessions) < 10

    run_open(steps, lambda prompt: "Hi.")


def test_a_rollout_that_was_dropped_goes_on_where_it_was(little_room):
    async def steps(http, bench, engine):
        first = await generate(http, "t0")
        for number in range(1, 30):
            await generate(http, f"t{number}")
        assert "t0" not in bench.gateway._sessions._adopted
        reply = {"role": "assistant", "content": first["response_text"]}
        second = await generate(http, "t0", USER, reply, {"role": "user", "content": "And?"})
        assert second["step_index"] == 1
        assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
        assert [node.parent for node in (await bench.pool.attempt("t0")).nodes] == [None, 0]

    run_open(steps, lambda prompt: "Hi.")


def test_a_session_that_a_call_still_uses_is_found_again(little_room):
    async def main():
        async with opened(lambda prompt: "Hi.", is_open=True) as (bench, _):
            http, sessions = bench.http(), bench.gateway._sessions
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

    asyncio.run(main())


def test_sampling_that_was_registered_outlives_the_session(little_room):
    async def main():
        async with opened(lambda prompt: "Hi.", is_open=True) as (bench, _):
            http, sessions = bench.http(), bench.gateway._sessions
            await generate(http, "t0")
            sessions.resample(await sessions.get("t0"), Sampling(temperature=0.25))
            for number in range(1, 30):
                await generate(http, f"t{number}")
            assert "t0" not in sessions._adopted
            assert (await sessions.get("t0")).sampling.temperature == 0.25

    asyncio.run(main())


def test_a_refused_request_is_not_kept():
    async def steps(http, bench, engine):
        await generate(http, "t0")
        session = await bench.gateway._sessions.get("t0")
        before = session.weight
        long = [{"role": "user", "content": "x" * 30_000}, {"role": "user", "content": 7}]
        wrong = await http.post("/generate", json={"trajectory_uid": "t0", "prompt_uid": "p1", "messages": long})
        too_long = await http.post("/t0/p1/v1/chat/completions", json={"model": "m", "messages": [long[0]] * 40})
        assert (wrong.status_code, too_long.status_code) == (422, 400), (wrong.text, too_long.text)
        assert session.weight <= before

    run_open(steps, lambda prompt: "Hi.", engine={"context_length": 4096})
