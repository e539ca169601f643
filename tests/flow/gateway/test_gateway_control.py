"""`POST /rollouts`: a runner elsewhere opens rollouts that nobody made before."""

from contextlib import asynccontextmanager

import pytest
from gateway_cases import USER, chat, renderer

from penstock.gateway.auth import GatewayTokens
from penstock.records import End
from penstock.testing import ScriptedEngine, workbench


@asynccontextmanager
async def gateway():
    engine = ScriptedEngine(lambda prompt: "four", renderer().tokenizer)
    async with workbench(engine, renderer()) as bench:
        yield bench, bench.http(bench.gateway.tokens.control), engine


async def opened(control, **body):
    response = await control.post("/rollouts", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_rollout_is_made_called_graded_and_ended():
    async with gateway() as (bench, control, _):
        rollout = await opened(control)
        name = rollout["rollout_id"]
        assert (await chat(bench.http(rollout["token"]), USER)).status_code == 200
        assert (await control.post(f"/rollouts/{name}/grade", json={"reward": 0.5})).status_code == 200
        assert (await control.post(f"/rollouts/{name}/end", json={})).json()["end"] == "completed"
        attempt = await bench.pool.rollout(name)
        assert (attempt.reward, len(attempt.steps), attempt.ref.channel) == (0.5, 1, "adhoc")
        assert (await chat(bench.http(rollout["token"]), USER)).status_code == 409


@pytest.mark.parametrize("reward", [1e308, -1.1e9])
async def test_reward_above_limit_is_rejected(reward):
    async with gateway() as (bench, control, _):
        name = (await opened(control))["rollout_id"]
        response = await control.post(f"/rollouts/{name}/grade", json={"reward": reward})
        assert (response.status_code, "1000000000" in response.text) == (400, True)
        assert (await bench.pool.rollout(name)).grades == ()


async def test_every_rollout_without_id_is_new_one_with_number():
    async with gateway() as (bench, control, _):
        names = {(await opened(control))["rollout_id"] for _ in range(5)}
        groups = await bench.pool.groups("adhoc")
        assert {attempt.ref.id for group in groups for attempt in group.rollouts} == names
        assert [group.seq for group in groups] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "body", [{"rollout_id": "mine"}, {"group_id": "mine"}, {"rollout_id": "mine", "task_id": "t", "channel": "x"}]
)
async def test_the_same_body_with_an_id_gives_the_same_rollout(body):
    async with gateway() as (bench, control, _):
        assert await opened(control, **body) == await opened(control, **body)
        assert (await bench.pool.stats()).rollouts == 1


@pytest.mark.parametrize(
    "body",
    [
        {"rollout_id": "mine", "task_id": "other"},
        {"rollout_id": "mine", "sampling": {"top_k": 3}},
        {"rollout_id": "mine", "group_id": "g"},
    ],
)
async def test_id_that_is_taken_by_something_else_is_conflict(body):
    async with gateway() as (_, control, _):
        await opened(control, rollout_id="mine")
        response = await control.post("/rollouts", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "rollout_exists")


async def test_id_of_another_place_is_a_conflict():
    async with gateway() as (_, control, _):
        await opened(control, group_id="g")
        response = await control.post("/rollouts", json={"group_id": "g", "rollout_id": "another"})
        assert response.status_code == 409


async def test_sampling_holds_on_every_gateway():
    async with gateway() as (bench, control, engine):
        rollout = await opened(control, sampling={"temperature": 0.5, "max_tokens": 3})
        await chat(bench.http(rollout["token"]), USER, max_tokens=100)
        async with workbench(engine, renderer(), pool=bench.pool) as other:
            await chat(other.http(rollout["token"]), USER)
        assert [(each.temperature, each.max_tokens) for each in engine.samplings] == [(0.5, 3), (0.5, 3)]


async def test_a_rollout_that_has_ended_is_not_opened_again():
    async with gateway() as (bench, control, _):
        rollout = await opened(control, rollout_id="mine")
        await bench.pool.end("mine", End.COMPLETED)
        bench.gateway.close("mine")
        assert (await control.post("/rollouts", json={"rollout_id": "mine"})).status_code == 409
        assert (await chat(bench.http(rollout["token"]), USER)).status_code == 409


async def test_a_model_token_that_another_gateway_signed_opens_nothing():
    async with gateway() as (bench, control, _):
        await opened(control, rollout_id="mine")
        foreign = GatewayTokens(b"another secret of another run").model("mine")
        assert (await chat(bench.http(foreign), USER)).status_code == 401
