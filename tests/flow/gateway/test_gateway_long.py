"""Conversations long enough for the gateway to read only what is new of each body."""

from contextlib import asynccontextmanager

from gateway_cases import chat, messages_of, renderer

from penstock.gateway.graph import prompts
from penstock.testing import ScriptedEngine, workbench


@asynccontextmanager
async def gateway():
    """Yields http, engine, bench, session: a gateway whose engine always says the same."""
    engine = ScriptedEngine(["42."] * 4, renderer().tokenizer)
    async with workbench(engine, renderer()) as bench:
        session = await bench.rollout()
        yield bench.http(session.token), engine, bench, session


async def test_long_conversation_and_its_retry_are_exact():
    async with gateway() as (http, engine, bench, session):
        talk = [{"role": "system", "content": "Multiply. " * 2000}]
        for turn in range(4):
            talk.append({"role": "user", "content": f"And {turn}?"})
            answer = await chat(http, *talk, seed=turn)
            again = await chat(http, *talk, seed=turn, headers={"x-stainless-retry-count": "1"})
            assert again.content == answer.content
            talk += messages_of(answer)
        attempt = await bench.attempt(session)
        assert [prompts(attempt)[step.index] for step in attempt.steps] == engine.prompts
        assert [node.parent for node in attempt.nodes] == [None, 0, 1, 2]


async def test_long_conversation_that_is_edited_is_read_unchanged_sent():
    async with gateway() as (http, _, bench, session):
        long = {"role": "system", "content": "Multiply. " * 2000}
        for asked in ("one", "other", "one"):
            await chat(http, long, {"role": "user", "content": asked}, {"role": "user", "content": "Now."})
        nodes = (await bench.attempt(session)).nodes
        assert [node.messages[1]["content"] for node in nodes] == ["one", "other"]
