"""The placeholder of the Osmosis documents: every integration calls the policy by it, and the gateway knows it."""

import asyncio
import json

import pytest
from agents import Runner
from framework_cases import sent
from gateway_cases import renderer

from penstock.integrations import langchain, openai_agents, strands
from penstock.testing import ScriptedEngine, workbench


async def call_strands():
    model = strands.RolloutModel()
    assert model.get_config()["model_id"] == "openai/osmosis-rollout"
    await strands.RolloutAgent(name="a", model=model, callback_handler=None).invoke_async("Hello")


async def call_openai_agents():
    agent = openai_agents.RolloutAgent(name="a", model=openai_agents.RolloutModel())
    assert agent.model.model == "openai/osmosis-rollout"
    await Runner.run(agent, "Hello", session=openai_agents.RolloutSession(name="a"))


async def call_langchain():
    await langchain.chat_model().ainvoke("Hello")


@pytest.mark.parametrize("work", [call_strands, call_openai_agents, call_langchain])
def test_requests_name_the_placeholder_of_the_documents(work):
    request = sent(work)
    assert json.loads(request.partition("\r\n\r\n")[2])["model"] == "osmosis-rollout"


@pytest.mark.parametrize("name", ["osmosis-rollout", "openai/osmosis-rollout"])
def test_the_gateway_knows_the_placeholder(name):
    async def main():
        async with workbench(ScriptedEngine(["42"], renderer().tokenizer), renderer()) as bench:
            session = await bench.rollout()
            http = bench.http(session.token)
            found = (await http.get(f"/v1/models/{name}")).json()
            body = {"model": name, "messages": [{"role": "user", "content": "6 x 7?"}]}
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            assert (found["id"], found["object"]) == (name, "model") and answer["choices"][0]["message"]["content"] == "42"
            assert (await http.get("/v1/models/some/other")).status_code == 404

    asyncio.run(main())
