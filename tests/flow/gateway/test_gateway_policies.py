"""Several policies behind one gateway: the model name chooses, and each has its own paths in the token graph."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from gateway_cases import USER, chat, renderer

from penstock.engines.text_endpoints.openai import OpenAIEndpoint, OpenAISection
from penstock.gateway.graph import prompts
from penstock.gateway.sources import ServedPolicy
from penstock.pool.rows import encode_row
from penstock.testing import ScriptedEngine, workbench

MORE = {"role": "user", "content": "And 6 times 8?"}
CALLS = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "What?"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/completions": {"prompt": "What?"},
    "/generate": {"messages": [USER]},
}


def engine(*replies, name="scripted"):
    return ScriptedEngine(list(replies), renderer().tokenizer, model=name)


@asynccontextmanager
async def gateway(*, planner=(), executor=(), default=None):
    """Yields http, bench, session, engines: a gateway with two policies, whose engines play these replies."""
    engines = {"planner": engine(*planner), "executor": engine(*executor)}
    served = {name: ServedPolicy(each, renderer(), default=name == default) for name, each in engines.items()}
    async with workbench(engines["planner"], renderer(), policies=served) as bench:
        session = await bench.rollout()
        yield bench.http(session.token), bench, session, engines


@pytest.mark.parametrize("path", CALLS)
async def test_the_model_name_chooses_the_policy_in_every_dialect(path):
    async with gateway(planner=["a plan"], executor=["done"]) as (http, bench, session, _):
        for name in ("executor", "planner"):
            answer = await http.post(path, json=CALLS[path] | {"model": name, "trajectory_uid": session.rollout_id})
            assert answer.status_code == 200, answer.text
            assert answer.json().get("model", name) == name
        first, second = (await bench.attempt(session)).steps
        assert [(step.policy, step.transcript, step.message["content"]) for step in (first, second)] == [
            ("executor", "executor", "done"),
            ("planner", "planner", "a plan"),
        ]


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("model", ["gpt-5", None])
async def test_a_name_of_no_policy_is_refused_in_every_dialect(path, model):
    async with gateway() as (http, bench, session, _):
        body = CALLS[path] | {"trajectory_uid": session.rollout_id} | ({"model": model} if model else {})
        answer = await http.post(path, json=body)
        assert answer.status_code == 404
        assert "this gateway serves the policies planner, executor" in answer.text
        assert not (await bench.attempt(session)).steps


async def test_default_policy_answers_other_names_and_counts_them():
    async with gateway(executor=["42"], default="executor") as (http, bench, session, _):
        assert (await chat(http, USER, model="gpt-5")).json()["model"] == "executor"
        assert bench.gateway.counts["answered_by_default:gpt-5"] == 1
        assert [step.policy for step in (await bench.attempt(session)).steps] == ["executor"]


@pytest.mark.parametrize("name", ["osmosis-rollout", "openai/osmosis-rollout"])
async def test_the_placeholder_is_the_default_policy_and_no_mistake(name):
    async with gateway(executor=["42"], default="executor") as (http, bench, _, _):
        assert (await chat(http, USER, model=name)).json()["model"] == "executor"
        assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
        assert not [count for count in bench.gateway.counts if count.startswith("answered_by_default")]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_text_endpoint_is_rejected_where_tokens_are_needed(path):
    async def main():
        user = ServedPolicy(OpenAIEndpoint("m", OpenAISection(name="openai", url="http://127.0.0.1:9/v1")), None)
        served = {"planner": ServedPolicy(engine(), renderer()), "user": user}
        async with workbench(served["planner"].engine, renderer(), policies=served) as bench:
            session = await bench.rollout()
            body = CALLS[path] | {"model": "user", "trajectory_uid": session.rollout_id}
            answer = await bench.http(session.token).post(path, json=body)
            assert answer.status_code == 400
            assert "user is behind an endpoint that gives text" in answer.text

    asyncio.run(main())


async def test_models_lists_the_policies():
    async with gateway() as (http, _, _, _):
        listed = (await http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["planner", "executor"]
        assert (listed["first_id"], listed["last_id"]) == ("planner", "executor")
        assert (await http.get("/v1/models/executor")).json()["id"] == "executor"
        assert (await http.get("/v1/models/scripted")).status_code == 404


async def test_policies_share_no_path_though_their_messages_are_the_same():
    async with gateway(planner=["same", "p"], executor=["same", "e"]) as (http, bench, session, engines):
        for name in ("planner", "executor"):
            await chat(http, USER, model=name)
        said = {"role": "assistant", "content": "same"}
        for name in ("planner", "executor"):
            await chat(http, USER, said, MORE, model=name)
        attempt = await bench.attempt(session)
        steps, nodes = {s.index: s for s in attempt.steps}, {n.id: n for n in attempt.nodes}
        assert len(nodes) == 4
        for step in attempt.steps:
            parent = nodes[step.node].parent
            assert parent is None or steps[parent].policy == step.policy
        assert [nodes[step.node].parent for step in attempt.steps] == [None, None, 0, 1]
        assert not any(node.reason for node in attempt.nodes)
        assert list(prompts(attempt).values()) == [
            *engines["planner"].prompts[:1],
            *engines["executor"].prompts[:1],
            *engines["planner"].prompts[1:],
            *engines["executor"].prompts[1:],
        ]


async def test_raw_prompts_of_two_policies_share_no_path():
    async with gateway(planner=["c"], executor=["x"]) as (http, bench, session, _):
        for name, prompt in (("planner", "ab"), ("executor", "abcd")):
            await http.post("/v1/completions", json={"model": name, "prompt": prompt})
        assert [node.parent for node in (await bench.attempt(session)).nodes] == [None, None]


async def test_reply_of_another_policy_in_history_is_no_break():
    async with gateway(planner=["a plan"], executor=["done"]) as (http, bench, session, _):
        await chat(http, USER, model="planner")
        await chat(http, USER, {"role": "assistant", "content": "a plan"}, MORE, model="executor")
        assert [(node.parent, node.reason) for node in (await bench.attempt(session)).nodes] == [(None, None), (None, None)]


async def test_agent_with_policys_name_and_no_model_gets_that_policy():
    async with gateway(planner=["a plan"], executor=["done"]) as (http, bench, session, _):
        await chat(http, USER, model="policy", headers={"x-sample-id": "executor"})
        await chat(http, USER, model="planner", headers={"x-sample-id": "executor"})
        made = [(step.policy, step.transcript) for step in (await bench.attempt(session)).steps]
        assert made == [("executor", "executor"), ("planner", "executor")]
        assert not bench.gateway.counts


async def test_a_named_transcript_keeps_its_name():
    async with gateway(planner=["a plan"]) as (http, bench, session, _):
        await chat(http, USER, model="planner", headers={"x-sample-id": "first draft"})
        (step,) = (await bench.attempt(session)).steps
        assert (step.policy, step.transcript) == ("planner", "first draft")


async def test_metrics_count_steps_and_tokens_by_policy():
    async with gateway(planner=["a plan"]) as (http, bench, session, _):
        await chat(http, USER, model="planner")
        text = (await bench.http(bench.gateway.tokens.admin).get("/metrics")).text
        assert 'penstock_policy_steps_total{policy="planner"} 1' in text
        size = len((await bench.attempt(session)).steps[0].completion_ids)
        assert f'penstock_policy_tokens_total{{policy="planner"}} {size}' in text


def test_without_policies_nothing_is_added():
    async def main():
        async with workbench(engine("42"), renderer()) as bench:
            session = await bench.rollout()
            await chat(bench.http(session.token), USER, model="whatever")
            (step,) = (await bench.attempt(session)).steps
            assert (step.policy, step.transcript) == ("", "main")
            assert b"policy" not in encode_row(step, "a step").record
            assert "penstock_policy_" not in (await bench.http(bench.gateway.tokens.admin).get("/metrics")).text.replace(
                "penstock_policy_version", ""
            )

    asyncio.run(main())
