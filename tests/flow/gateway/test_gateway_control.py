"""`POST /rollouts`: a runner elsewhere opens rollouts that nobody made before."""

import asyncio

import pytest
from gateway_cases import USER, chat, renderer

from penstock.gateway.auth import GatewayTokens
from penstock.records import End
from penstock.testing import ScriptedEngine, workbench


def run(steps):
    async def main():
        engine = ScriptedEngine(lambda prompt: "four", renderer().tokenizer)
        async with workbench(engine, renderer()) as bench:
            await steps(bench, bench.http(bench.gateway.tokens.control), engine)

    asyncio.run(main())


async def opened(control, **body):
    response = await control.post("/rollouts", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_rollout_is_made_called_graded_and_ended():
    async def steps(bench, control, engine):
        rollout = await opened(control)
        name = rollout["rollout_id"]
        assert (await chat(bench.http(rollout["token"]), USER)).status_code == 200
        assert (await control.post(f"/rollouts/{name}/grade", json={"reward": 0.5})).status_code == 200
        assert (await control.post(f"/rollouts/{name}/end", json={})).json()["end"] == "completed"
        attempt = await bench.pool.attempt(name)
        assert (attempt.reward, len(attempt.steps), attempt.rollout.channel) == (0.5, 1, "adhoc")
        assert (await chat(bench.http(rollout["token"]), USER)).status_code == 409

    run(steps)


@pytest.mark.parametrize("reward", [1e308, -1.1e9])
def test_reward_that_the_arithmetic_does_not_bear_is_refused_with_the_bound(reward):
    async def steps(bench, control, engine):
        name = (await opened(control))["rollout_id"]
        response = await control.post(f"/rollouts/{name}/grade", json={"reward": reward})
        assert (response.status_code, "1000000000" in response.text) == (400, True)
        assert (await bench.pool.attempt(name)).grades == ()

    run(steps)


def test_every_rollout_without_an_id_is_a_new_one_with_a_number_of_its_own():
    async def steps(bench, control, engine):
        names = {(await opened(control))["rollout_id"] for _ in range(5)}
        groups = await bench.pool.groups("adhoc")
        assert {attempt.rollout.id for group in groups for attempt in group.attempts} == names
        assert [group.seq for group in groups] == [0, 1, 2, 3, 4]

    run(steps)


@pytest.mark.parametrize(
    "body", [{"rollout_id": "mine"}, {"group_id": "mine"}, {"rollout_id": "mine", "task_id": "t", "channel": "x"}]
)
def test_the_same_body_with_an_id_gives_the_same_rollout(body):
    async def steps(bench, control, engine):
        assert await opened(control, **body) == await opened(control, **body)
        assert (await bench.pool.stats()).rollouts == 1

    run(steps)


@pytest.mark.parametrize(
    "body",
    [
        {"rollout_id": "mine", "task_id": "other"},
        {"rollout_id": "mine", "sampling": {"top_k": 3}},
        {"rollout_id": "mine", "group_id": "g"},
    ],
)
def test_an_id_that_is_taken_by_something_else_is_a_conflict(body):
    async def steps(bench, control, engine):
        await opened(control, rollout_id="mine")
        response = await control.post("/rollouts", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "rollout_exists")

    run(steps)


def test_an_id_that_names_the_place_of_a_group_with_other_rollouts_is_a_conflict():
    async def steps(bench, control, engine):
        await opened(control, group_id="g")
        response = await control.post("/rollouts", json={"group_id": "g", "rollout_id": "another"})
        assert response.status_code == 409

    run(steps)


def test_sampling_holds_for_every_gateway_that_serves_the_rollout_and_caps_its_replies():
    async def steps(bench, control, engine):
        rollout = await opened(control, sampling={"temperature": 0.5, "max_tokens": 3})
        await chat(bench.http(rollout["token"]), USER, max_tokens=100)
        async with workbench(engine, renderer(), pool=bench.pool) as other:
            await chat(other.http(rollout["token"]), USER)
        assert [(each.temperature, each.max_tokens) for each in engine.samplings] == [(0.5, 3), (0.5, 3)]

    run(steps)


def test_a_rollout_that_has_ended_is_not_opened_again():
    async def steps(bench, control, engine):
        rollout = await opened(control, rollout_id="mine")
        await bench.pool.end("mine", End.COMPLETED)
        bench.gateway.close("mine")
        assert (await control.post("/rollouts", json={"rollout_id": "mine"})).status_code == 409
        assert (await chat(bench.http(rollout["token"]), USER)).status_code == 409

    run(steps)


def test_a_model_token_that_another_gateway_signed_opens_nothing():
    async def steps(bench, control, engine):
        await opened(control, rollout_id="mine")
        foreign = GatewayTokens(b"another secret of another run").model("mine")
        assert (await chat(bench.http(foreign), USER)).status_code == 401

    run(steps)
