"""Calls that happen twice: whatever a client repeats, there is one step, and everyone gets the same bytes."""

import asyncio
import random

import pytest
from gateway_client import RETRY, Client

from penstock.records import Sampling
from penstock.testing import ScriptedEngine, ScriptedReply, memory_pool, workbench

PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]


def run(renderer, script, steps, **options):
    async def main():
        engine = ScriptedEngine(script, renderer.tokenizer)
        async with workbench(engine, renderer, **options) as bench:
            await steps(bench, await bench.rollout(), engine)

    asyncio.run(asyncio.wait_for(main(), 250))


def ask(bench, session, *headers, path=PATHS[0], text="?", **fields):
    body = {"input": text} if path.endswith("responses") else {"messages": [{"role": "user", "content": text}], "max_tokens": 64}
    if path.endswith("responses"):
        fields["messages"] = None
    return Client(bench.gateway, session, headers=headers, path=path, **body | fields)


async def joined(bench, count):
    """Wait until that many retries have joined a call."""
    while bench.gateway.counts["joined_call"] < count:  # noqa: ASYNC110 (a count has no event)
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_retry_joins_call_in_flight_and_both_get_same_bytes(renderer, path, stream):
    async def steps(bench, session, engine):
        first = ask(bench, session, path=path, stream=stream)
        await engine.stalled.wait()
        again = ask(bench, session, RETRY, path=path, stream=stream)
        await joined(bench, 1)
        engine.release()
        assert await first.answer() == await again.answer()
        assert first.status == 200
        assert len((await bench.attempt(session)).steps) == len(engine.prompts) == 1

    run(renderer, [ScriptedReply("It is 42.", stall_after=3)], steps)


@pytest.mark.parametrize("stream", [False, True])
def test_who_joined_gets_the_answer_although_the_first_caller_disconnected(renderer, stream):
    async def steps(bench, session, engine):
        first = ask(bench, session, stream=stream)
        await engine.stalled.wait()
        again = ask(bench, session, RETRY, stream=stream)
        await joined(bench, 1)
        first.hang_up()
        await asyncio.sleep(0)
        engine.release()
        status, body = await again.answer()
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n") if stream else b"It is 42." in body
        (step,) = (await bench.attempt(session)).steps
        assert (step.finish, step.message["content"]) == ("stop", "It is 42.")

    run(renderer, [ScriptedReply("It is 42.", stall_after=3)], steps)


def test_when_all_have_hung_up_the_engine_is_free(renderer):
    async def steps(bench, session, engine):
        callers = [ask(bench, session)]
        await engine.stalled.wait()
        callers += [ask(bench, session, RETRY) for _ in range(3)]
        await joined(bench, 3)
        for caller in random.Random(5).sample(callers, 4):
            assert engine.running == 1
            caller.hang_up()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await engine.idle.wait()
        await asyncio.gather(*[caller.task for caller in callers])
        assert [step.finish for step in (await bench.attempt(session)).steps] == ["cancelled"]

    run(renderer, [ScriptedReply("It is 42.", stall_after=3)], steps)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_answer_that_got_lost_is_sent_again_byte_for_byte(renderer, path, stream):
    async def steps(bench, session, engine):
        first = await ask(bench, session, path=path, stream=stream).answer()
        assert await ask(bench, session, RETRY, path=path, stream=stream).answer() == first
        assert len((await bench.attempt(session)).steps) == len(engine.prompts) == 1

    run(renderer, ["It is 42."], steps)


@pytest.mark.parametrize("path", PATHS)
def test_another_gateway_gives_the_same_bytes_from_the_record(renderer, path):
    async def main():
        pool, engine = memory_pool(), ScriptedEngine(["It is 42."], renderer.tokenizer)
        async with workbench(engine, renderer, pool=pool) as bench:
            session = await bench.rollout()
            first = await ask(bench, session, path=path).answer()
        async with workbench(engine, renderer, pool=pool, sampling={"train": Sampling(max_tokens=1024)}) as bench:
            assert await ask(bench, session, RETRY, path=path).answer() == first
            assert bench.gateway.counts["replayed_call"] == 1

    asyncio.run(main())


def test_idempotency_key_is_retry_mark_for_same_body_only(renderer):
    async def steps(bench, session, engine):
        key = (b"idempotency-key", b"k1")
        first = await ask(bench, session, key).answer()
        assert await ask(bench, session, key).answer() == first
        assert await ask(bench, session, key, text="another").answer() != first
        assert await ask(bench, session, (b"idempotency-key", b"k2")).answer() != first
        assert len((await bench.attempt(session)).steps) == len(engine.prompts) == 3

    run(renderer, ["one", "two", "three"], steps)


@pytest.mark.slow
def test_ten_thousand_retries_make_no_step_twice(renderer):
    calls, retries = 1_000, 10

    async def steps(bench, session, engine):
        chance, answers = random.Random(7), {}

        async def once(number, *headers):
            stream = number % 2 == 0
            client = ask(bench, session, *headers, path=PATHS[number % 3], text=f"call {number}", stream=stream)
            if chance.random() < 0.1 and headers:  # this one gets no answer: it hangs up somewhere
                await client.heard(chance.randrange(3))
                client.hang_up()
                await client.task
                return
            answers.setdefault(number, set()).add(await client.answer())

        for start in range(0, calls, 50):
            numbers = range(start, start + 50)
            await asyncio.gather(*[once(number) for number in numbers], *[once(number, RETRY) for number in numbers])
            rest = [number for number in numbers for _ in range(retries - 1)]
            chance.shuffle(rest)
            await asyncio.gather(*[once(number, RETRY) for number in rest])
        assert all(len(said) == 1 for said in answers.values())
        assert all(status == 200 for said in answers.values() for status, _ in said)
        whole = [step for step in (await bench.attempt(session)).steps if step.finish == "stop"]
        assert len({step.node for step in whole}) == len(whole) == len(answers) == calls

    run(renderer, lambda prompt: f"{hash(prompt)} it is.", steps)
