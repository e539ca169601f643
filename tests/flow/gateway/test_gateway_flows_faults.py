"""Flow routes over a pool that fails, and over several workers: never a 500, nothing taken twice."""

import asyncio

import pytest
from gateway_cases import USER
from gateway_flow_cases import gateway, generate, open_gateway, step_of, submit

from penstock.errors import PoolError, PoolFailed


def failing(pool, monkeypatch, name, error):
    async def fail(*_, **__):
        raise error

    monkeypatch.setattr(pool, name, fail)  # a store that fails at one call only is no pool that could be written as a fake


ASKED = [
    ("mark", "/submit_steps", {}),
    ("grade", "/submit_steps", {"reward": 1.0}),
    ("rollout", "/submit_steps", {"is_last": True}),
    ("grade", "/complete_trajectory/t1", {"reward": 1.0}),
    ("end", "/complete_trajectory/t1", {}),
    ("rollout", "/t2/1/v1/register_trajectory", {}),
    ("open_group", "/t2/1/v1/register_trajectory", {}),
    ("task", "/t2/1/v1/register_trajectory", {}),
    ("open_group", "/t2/1/v1/chat/completions", {"messages": [USER]}),
    ("open_group", "/t2/1/v1/generate", {"messages": [USER]}),
]


@pytest.mark.parametrize(("name", "path", "fields"), ASKED)
async def test_failing_pool_is_a_503(name, path, fields, monkeypatch):
    async with open_gateway(["Hi.", "Ho."]) as (http, bench, _):
        answer = await generate(http)
        body = {"steps": [step_of(answer, **fields)]} if path == "/submit_steps" else fields
        with monkeypatch.context() as broken:
            failing(bench.pool, broken, name, PoolFailed("the disk is full"))
            refused = await http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
        assert (await http.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/api/stats", "/api/steps", "/api/trajectories", "/api/events", "/api/config"])
async def test_reading_a_pool_that_fails_is_a_503(path, monkeypatch):
    async with open_gateway() as (http, bench, _):
        failing(bench.pool, monkeypatch, "channels", PoolFailed("the server is away"))
        assert (await http.get(path)).status_code == 503


async def test_gateway_whose_pool_fails_is_not_ready(monkeypatch):
    async with open_gateway() as (http, bench, _):
        failing(bench.pool, monkeypatch, "position", PoolFailed("the server is away"))
        answer = await http.get("/ready")
        assert answer.status_code == 503 and "the server is away" in answer.json()["detail"]


@pytest.mark.parametrize("name", ["mark", "grade"])
async def test_refusal_of_the_pool_is_a_409(name, monkeypatch):
    async with gateway(["Hi."]) as (bench, session, _):
        answer = await generate(bench.http(session.token), session.rollout_id)
        failing(bench.pool, monkeypatch, name, PoolError("not like this"))
        response = await submit(bench.http(session.flow_token), step_of(answer, reward=1.0 if name == "grade" else None))
        assert (response.status_code, response.json()["detail"]) == (409, "not like this")


async def test_group_of_a_run_is_no_trajectory():
    async with open_gateway() as (http, bench, _):
        await bench.rollout("train-0")
        response = await http.post("/train-0/1/v1/register_trajectory", json={})
        assert response.status_code == 404


async def test_first_calls_at_once_open_one_trajectory():
    async with open_gateway(lambda prompt: "Hi.") as (http, bench, _):
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(generate(http, "t1")) for _ in range(8)]
        assert sorted(call.result()["step_index"] for call in calls) == list(range(8))
        assert (await bench.pool.stats()).rollouts == 1


async def test_caller_that_hangs_up_within_its_request_completes_nothing():
    async with open_gateway(["Hi."]) as (http, bench, _):
        await generate(http)
        scope = {"type": "http", "method": "POST", "path": "/complete_trajectory/t1", "headers": [(b"host", b"localhost")]}
        sent, parts = [], [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

        async def receive():
            return parts.pop(0)

        async def send(message):
            sent.append(message)

        await bench.gateway.app(scope | {"query_string": b""}, receive, send)
        assert (await bench.pool.rollout("t1")).end is None and sent[0]["status"] == 400
