"""What a gateway reports a rollout when it is closed: the same as the pool holds, or nothing."""

import asyncio

import pytest
from gateway_cases import USER, chat, renderer

from penstock.pool.memory import MemoryPool
from penstock.records import Sampling, Task, make_rollout
from penstock.testing import ScriptedEngine, memory_pool, workbench


class CountingPool(MemoryPool):
    """Counts who asks it for a rollout."""

    def __init__(self):
        super().__init__(lambda: 0.0)
        self.asked = 0

    async def rollout(self, rollout_id, *, first_step=0, first_node=0):
        self.asked += 1
        return await super().rollout(rollout_id, first_step=first_step, first_node=first_node)


def closed(calls, *, fresh=True, pool=None, script=("one", "two"), secrets=()):
    """Close a rollout after `calls(http)`; what the gateway reports it, and what the pool holds."""

    async def main():
        store = pool or memory_pool()
        rollout = make_rollout("train-0", "t", 0)
        await store.open_group(Task(id="t", prompt=(USER,)), [rollout], seq=0)
        engine = ScriptedEngine(list(script), renderer().tokenizer)
        async with workbench(engine, renderer(), pool=store, secrets=secrets) as bench:
            session = bench.gateway.open(rollout, Sampling(), fresh=fresh)
            await calls(bench.http(session.token))
            reported = bench.gateway.close(rollout.id)
            asked = getattr(store, "asked", None)
            return reported, await store.rollout(rollout.id), asked

    return asyncio.run(main())


async def two_turns(http):
    await chat(http, USER)
    await chat(http, USER, {"role": "assistant", "content": "one"}, USER)


@pytest.mark.parametrize("fresh", [True, False])
def test_closed_rollout_is_reported_as_pool_holds_it(fresh):
    reported, stored, _ = closed(two_turns, fresh=fresh)
    assert (reported.ref, reported.nodes, reported.steps) == (stored.ref, stored.nodes, stored.steps)
    assert len(reported.steps) == 2


def test_the_pool_is_not_asked_about_a_fresh_rollout():
    assert closed(two_turns, pool=CountingPool())[2] == 0
    assert closed(two_turns, pool=CountingPool(), fresh=False)[2] == 1


def test_where_a_secret_was_taken_out_only_the_pool_reports():
    reported, stored, _ = closed(lambda http: chat(http, USER), script=["It is hunter2hunter2."], secrets=["hunter2hunter2"])
    assert reported is None
    assert stored.steps[0].message["content"] == "It is [redacted]."


def test_where_the_caller_sent_a_secret_only_the_pool_reports():
    asked = {"role": "user", "content": "my key is hunter2hunter2"}
    reported, stored, _ = closed(lambda http: chat(http, asked), secrets=["hunter2hunter2"])
    assert reported is None
    assert stored.nodes[0].messages[0]["content"] == "my key is [redacted]"


class Silent(ScriptedEngine):
    """Takes a call and never answers it."""

    def __init__(self):
        super().__init__([], renderer().tokenizer)
        self.asked = asyncio.Event()

    async def generate(self, prompt_ids, sampling, *, rollout_id=""):
        self.asked.set()
        await asyncio.Event().wait()
        yield


def test_of_rollout_whose_call_still_runs_only_pool_reports():
    async def main():
        engine = Silent()
        async with workbench(engine, renderer()) as bench:
            session = await bench.rollout()
            call = asyncio.ensure_future(chat(bench.http(session.token), USER))
            await engine.asked.wait()
            assert bench.gateway.close(session.rollout_id) is None
            assert (await call).status_code == 409

    asyncio.run(main())


def test_a_rollout_that_nobody_opened_is_nothing_to_tell_of():
    async def main():
        async with workbench(ScriptedEngine([], renderer().tokenizer), renderer()) as bench:
            assert bench.gateway.close("train-7.0.1") is None

    asyncio.run(main())


def test_of_rollout_that_was_graded_by_route_only_pool_reports():
    async def main():
        async with workbench(ScriptedEngine(["one"], renderer().tokenizer), renderer()) as bench:
            session = await bench.rollout()
            await chat(bench.http(session.token), USER)
            control = bench.http(bench.gateway.tokens.control)
            answer = await control.post(f"/rollouts/{session.rollout_id}/grade", content='{"reward": 0.5}')
            assert answer.status_code == 200
            assert bench.gateway.close(session.rollout_id) is None
            assert [grade.reward for grade in (await bench.attempt(session)).grades] == [0.5]

    asyncio.run(main())
