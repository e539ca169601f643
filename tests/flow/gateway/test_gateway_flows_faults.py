"""Flow routes over a pool that fails, and over several workers: never a 500, nothing taken twice."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from gateway_cases import USER, renderer
from gateway_flow_cases import generate, run, run_open, step_of, submit

from penstock.errors import PoolError, PoolFailed
from penstock.gateway.app import Gateway
from penstock.gateway.shared_counters import Peers
from penstock.records import End
from penstock.testing import GatewayFixture, ScriptedEngine, memory_pool


def failing(pool, monkeypatch, name, error):
    async def fail(*_, **__):
        raise error

    monkeypatch.setattr(pool, name, fail)  # a store that fails at one call only is no pool that could be written as a fake


ASKED = [
    ("mark", "/submit_steps", {}),
    ("grade", "/submit_steps", {"reward": 1.0}),
    ("attempt", "/submit_steps", {"is_last": True}),
    ("grade", "/complete_trajectory/t1", {"reward": 1.0}),
    ("end", "/complete_trajectory/t1", {}),
    ("attempt", "/t2/1/v1/register_trajectory", {}),
    ("open_group", "/t2/1/v1/register_trajectory", {}),
    ("task", "/t2/1/v1/register_trajectory", {}),
    ("open_group", "/t2/1/v1/chat/completions", {"messages": [USER]}),
    ("open_group", "/t2/1/v1/generate", {"messages": [USER]}),
]


@pytest.mark.parametrize(("name", "path", "fields"), ASKED)
def test_a_pool_that_fails_is_a_503_and_the_same_call_is_served_later(name, path, fields, monkeypatch):
    async def steps(http, bench, engine):
        told = await generate(http)
        body = {"steps": [step_of(told, **fields)]} if path == "/submit_steps" else fields
        with monkeypatch.context() as broken:
            failing(bench.pool, broken, name, PoolFailed("the disk is full"))
            refused = await http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
        assert (await http.post(path, json=body)).status_code == 200

    run_open(steps, ["Hi.", "Ho."])


@pytest.mark.parametrize("path", ["/api/stats", "/api/steps", "/api/trajectories", "/api/events", "/api/config"])
def test_reading_a_pool_that_fails_is_a_503(path, monkeypatch):
    async def steps(http, bench, engine):
        failing(bench.pool, monkeypatch, "channels", PoolFailed("the server is away"))
        assert (await http.get(path)).status_code == 503

    run_open(steps)


def test_a_gateway_whose_pool_fails_is_not_ready(monkeypatch):
    async def steps(http, bench, engine):
        failing(bench.pool, monkeypatch, "position", PoolFailed("the server is away"))
        answer = await http.get("/ready")
        assert answer.status_code == 503 and "the server is away" in answer.json()["detail"]

    run_open(steps)


@pytest.mark.parametrize("name", ["mark", "grade"])
def test_what_the_pool_refuses_is_a_409_in_its_own_words(name, monkeypatch):
    async def steps(bench, session, engine):
        told = await generate(bench.http(session.token), session.rollout_id)
        failing(bench.pool, monkeypatch, name, PoolError("not like this"))
        response = await submit(bench.http(session.flow_token), step_of(told, reward=1.0 if name == "grade" else None))
        assert (response.status_code, response.json()["detail"]) == (409, "not like this")

    run(steps, ["Hi."])


def test_a_name_that_is_a_group_of_a_run_is_no_trajectory():
    async def steps(http, bench, engine):
        await bench.rollout("train-0")
        response = await http.post("/train-0/1/v1/register_trajectory", json={})
        assert response.status_code == 404

    run_open(steps)


def test_first_calls_at_once_open_one_trajectory():
    async def steps(http, bench, engine):
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(generate(http, "t1")) for _ in range(8)]
        assert sorted(call.result()["step_index"] for call in calls) == list(range(8))
        assert (await bench.pool.stats()).rollouts == 1

    run_open(steps, lambda prompt: "Hi.")


def test_two_workers_share_a_trajectory_from_its_first_call_to_its_end():
    async def main():
        engine, pool = ScriptedEngine(lambda prompt: "Hi.", renderer().tokenizer), memory_pool()
        async with AsyncExitStack() as clients:
            secret = b"a secret for tests only"
            gateways = [Gateway(engine, renderer(), pool, secret=secret, peers=Peers(n, 2)) for n in range(2)]
            one, other = [GatewayFixture(each, pool, False, clients).http(each.tokens.control) for each in gateways]
            uid = (await one.post("/init_trajectory")).json()["trajectory_uid"]
            said = {"channel": "val", "metadata": {"row": 1}}
            assert (await other.post(f"/{uid}/p/v1/register_trajectory", json=said)).status_code == 200
            told = []
            for http in (one, other, one):
                http.headers.pop("authorization", None)
                answer = await http.post(f"/{uid}/p/v1/generate", json={"messages": [USER], "prompt_uid": "p"})
                told.append(answer.json())
            assert [answer["step_index"] for answer in told] == [0, 1, 2]
            control = {"authorization": f"Bearer {gateways[0].tokens.control}"}
            last = {"steps": [step_of(answer, reward=1.0, step_index=place) for place, answer in enumerate(told)]}
            last["steps"][-1]["is_last"] = True
            for http in (other, one, other):
                assert (await http.post("/submit_steps", json=last, headers=control)).json() == {"accepted": 3}
            for http in (one, other):
                late = await http.post(f"/{uid}/p/v1/chat/completions", json={"messages": [USER]})
                assert late.status_code == 410
            attempt = await pool.attempt(uid)
            assert (attempt.end, attempt.reward, attempt.rollout.channel) == (End.COMPLETED, 3.0, "val")

    asyncio.run(main())


def test_a_caller_that_hangs_up_within_its_request_completes_nothing():
    async def steps(http, bench, engine):
        await generate(http)
        scope = {"type": "http", "method": "POST", "path": "/complete_trajectory/t1", "headers": [(b"host", b"localhost")]}
        sent, parts = [], [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

        async def receive():
            return parts.pop(0)

        async def send(message):
            sent.append(message)

        await bench.gateway.app(scope | {"query_string": b""}, receive, send)
        assert (await bench.pool.attempt("t1")).end is None and sent[0]["status"] == 400

    run_open(steps, ["Hi."])
