"""`top_logprobs` in each dialect, read by the vendor's own package from the tiny policy, and recorded with the step."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from gateway_cases import USER, chat, renderer

from penstock.chat.renderer import Renderer
from penstock.config import EmbeddedSection
from penstock.engines.base import open_engine
from penstock.models.pull import resolve
from penstock.pool import POOLS
from penstock.testing import ScriptedEngine, workbench


@asynccontextmanager
async def gateway(tmp_path):
    """Yields client, bench, session: a gateway with the tiny policy."""
    model = await asyncio.to_thread(resolve, "tiny", lambda *_: None)
    own = Renderer.load(model.path)
    section = EmbeddedSection(device="cpu")
    engine = await open_engine(section, model.path, name="tiny", seed=0, decode=own.tokenizer.decode)
    pool = POOLS.load("sqlite")(tmp_path / "pool")
    try:
        async with workbench(engine, own, pool=pool) as bench:
            session = await bench.rollout()
            yield bench.openai(session), bench, session
    finally:
        await pool.close()
        await engine.close()


async def recorded(bench, session):
    step = (await bench.attempt(session)).steps[-1]
    assert len(step.most_likely) == len(step.completion_ids) > 1 and not bench.gateway.counts["ignored:top_logprobs"]
    return [[logprob for _, logprob in likely] for likely in step.most_likely]


def read(entries):
    return [[other.logprob for other in entry.top_logprobs] for entry in entries]


async def test_chat_completions(tmp_path):
    async with gateway(tmp_path) as (client, bench, session):
        asked = {"model": "any", "messages": [USER], "logprobs": True, "top_logprobs": 4, "max_tokens": 6}
        entries = (await client.chat.completions.create(**asked)).choices[0].logprobs.content
        assert read(entries) == [pytest.approx(row) for row in await recorded(bench, session)]
        assert {len(row) for row in read(entries)} == {4} and entries[0].top_logprobs[0].token
        events = [event async for event in await client.chat.completions.create(**asked, stream=True)]
        choices = [choice for event in events for choice in event.choices if choice.logprobs]
        streamed = [entry for choice in choices for entry in choice.logprobs.content]
        assert read(streamed) == [pytest.approx(row) for row in await recorded(bench, session)]


async def test_responses(tmp_path):
    async with gateway(tmp_path) as (client, bench, session):
        asked = {"model": "any", "input": "3 * 4", "top_logprobs": 2, "max_output_tokens": 16}
        asked["include"] = ["message.output_text.logprobs"]
        response = await client.responses.create(**asked)
        assert read(response.output[0].content[0].logprobs) == [pytest.approx(row) for row in await recorded(bench, session)]
        assert response.top_logprobs == 2
        last = [event async for event in await client.responses.create(**asked, stream=True)][-1].response
        assert read(last.output[0].content[0].logprobs) == [pytest.approx(row) for row in await recorded(bench, session)]


async def test_completions(tmp_path):
    async with gateway(tmp_path) as (client, bench, session):
        asked = {"model": "any", "prompt": "3 * 4 =", "logprobs": 3, "max_tokens": 6}
        reported = (await client.completions.create(**asked)).choices[0].logprobs.top_logprobs
        assert [max(each.values()) for each in reported] == pytest.approx([row[0] for row in await recorded(bench, session)])
        events = [event async for event in await client.completions.create(**asked, stream=True)]
        reported = [likely for event in events for choice in event.choices for likely in choice.logprobs.top_logprobs or ()]
        assert [max(each.values()) for each in reported] == pytest.approx([row[0] for row in await recorded(bench, session)])


def test_an_engine_that_does_not_tell_them_is_counted():
    async def main():
        async with workbench(ScriptedEngine(["42."], renderer().tokenizer), renderer()) as bench:
            session = await bench.rollout()
            answer = (await chat(bench.http(session.token), USER, top_logprobs=2)).json()
            assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
            assert bench.gateway.counts["ignored:top_logprobs"] == 1

    asyncio.run(main())
