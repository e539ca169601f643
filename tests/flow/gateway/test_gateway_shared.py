"""Two workers of one gateway over one pool: whichever a call lands in, its rollout goes on where it was."""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from gateway_cases import USER, chat, messages_of, renderer

from penstock.errors import PoolError
from penstock.gateway.app import Gateway
from penstock.gateway.auth import GatewayTokens
from penstock.gateway.shared_counters import Peers
from penstock.pool.memory import MemoryPool
from penstock.records import End, Sampling, Task, make_rollout
from penstock.testing import GatewayFixture, ScriptedEngine, ScriptedReply, memory_pool

ROLLOUT = make_rollout("train-0", "t", 0)
SECRET = b"a secret for tests only"


def run(steps, script=lambda prompt: "Hi.", *, pool=memory_pool, boards=(False, True)):
    """Run `steps` with an HTTP client of each worker, and the pool and the engine that they share: with a board and without."""

    async def main(folder):
        engine, shared = ScriptedEngine(script, renderer().tokenizer), pool()
        await shared.open_group(Task(id="t", prompt=()), [ROLLOUT], seq=0)
        async with asyncio.timeout(60), AsyncExitStack() as clients:
            https = [worker(engine, shared, clients, Peers(number, 2, folder)) for number in range(2)]
            await steps(*https, shared, engine)

    for board in boards:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(Path(folder) if board else None))


def worker(engine, pool, clients, peers):
    """An HTTP client of a gateway's worker."""
    gateway = Gateway(engine, renderer(), pool, secret=SECRET, sampling={"": Sampling()}, peers=peers)
    return GatewayFixture(gateway, pool, False, clients).http(gateway.tokens.model(ROLLOUT.id))


def test_turns_that_alternate_between_workers_are_one_exact_path():
    async def steps(one, other, pool, engine):
        talk = [USER]
        for turn in range(8):
            talk += [messages_of(await chat([one, other][turn % 2], *talk))[0], USER]
        attempt = await pool.attempt(ROLLOUT.id)
        assert [node.parent for node in attempt.nodes] == [None, *range(7)]
        assert [node.reason for node in attempt.nodes] == [None] * 8
        for before, after, step in zip(engine.prompts, engine.prompts[1:], attempt.steps, strict=False):
            assert after[: len(before) + len(step.completion_ids)] == before + step.completion_ids

    run(steps)


def test_steps_that_two_workers_sample_at_once_get_different_numbers_and_names():
    async def steps(one, other, pool, engine):
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(chat(http, USER)) for http in (one, other, one, other)]
            await engine.until_stalling(4)
            engine.release()
        attempt = await pool.attempt(ROLLOUT.id)
        assert [step.index for step in attempt.steps] == [0, 1, 2, 3]
        assert len({call.result().json()["id"] for call in calls}) == len({step.answer for step in attempt.steps}) == 4
        assert len(attempt.nodes) == 1

    run(steps, lambda prompt: ScriptedReply("Hello", stall_after=1))


def test_a_retry_that_lands_in_the_other_worker_gets_the_recorded_answer():
    async def steps(one, other, pool, engine):
        first = await chat(one, USER)
        again = await chat(other, USER, headers={"x-stainless-retry-count": "1"})
        assert again.content == first.content
        assert len((await pool.attempt(ROLLOUT.id)).steps) == 1

    run(steps)


def test_a_rollout_that_one_worker_ended_is_over_in_the_other():
    async def steps(one, other, pool, engine):
        for http in (one, other):
            assert (await chat(http, USER)).status_code == 200
        control = {"authorization": f"Bearer {GatewayTokens(SECRET).control}"}
        ended = await one.post(f"/rollouts/{ROLLOUT.id}/end", json={"end": "completed"}, headers=control)
        assert ended.status_code == 200
        for http in (one, other, one):
            response = await chat(http, USER)
            assert (response.status_code, response.json()["error"]["code"]) == (409, "rollout_ended")

    run(steps)


def test_a_rollout_that_ended_past_all_workers_takes_no_step_from_either():
    async def steps(one, other, pool, engine):
        for http in (one, other):
            assert (await chat(http, USER)).status_code == 200
        await pool.end(ROLLOUT.id, End.COMPLETED)
        for http in (one, other, one):
            assert (await chat(http, USER)).json()["error"]["code"] == "rollout_ended"
        assert len((await pool.attempt(ROLLOUT.id)).steps) == 2

    run(steps)


def test_with_a_board_the_pool_is_asked_only_after_another_worker_wrote():
    async def steps(one, other, pool, engine):
        asked = []
        for http in (one, one, one, other, other, one, one):
            before = pool.asked
            assert (await chat(http, USER)).status_code == 200
            asked.append(pool.asked - before)
        assert asked == [1, 0, 0, 1, 0, 1, 0]

    run(steps, pool=Asked, boards=[True])


def test_an_answer_that_its_worker_did_not_come_to_tell_of_is_known_to_all_once_a_retry_has_it(tmp_path):
    async def main():
        engine, pool = ScriptedEngine(lambda prompt: "Hi.", renderer().tokenizer), memory_pool()
        await pool.open_group(Task(id="t", prompt=()), [ROLLOUT], seq=0)
        async with asyncio.timeout(60), AsyncExitStack() as clients:
            other = worker(engine, pool, clients, Peers(1, 2, tmp_path))
            await chat(other, {"role": "user", "content": "Another talk."})
            await chat(worker(engine, pool, clients, Peers(0, 2)), USER)  # it dies once the step is stored: nobody hears of it
            successor = worker(engine, pool, clients, Peers(0, 2, tmp_path))
            again = await chat(successor, USER, headers={"x-stainless-retry-count": "1"})
            await chat(other, USER, messages_of(again)[0], USER)
        nodes = (await pool.attempt(ROLLOUT.id)).nodes
        assert [(node.parent, node.reason) for node in nodes] == [(None, None), (None, None), (1, None)]

    asyncio.run(main())


def test_a_call_that_finds_its_rollout_taken_over_by_one_that_asked_earlier_knows_what_came_between():
    async def steps(one, other, pool, engine):
        await chat(one, {"role": "user", "content": "Another talk."})
        pool.answers = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(chat(other, {"role": "user", "content": "A third."}))
            await pool.asked.acquire()
            answer = await chat(one, USER)
            group.create_task(chat(other, USER, messages_of(answer)[0], USER))
            await pool.asked.acquire()
            pool.answers.set()
        assert [node.reason for node in (await pool.attempt(ROLLOUT.id)).nodes] == [None] * 4

    run(steps, pool=Slow)


class Slow(MemoryPool):
    """Takes its time to tell a task."""

    def __init__(self):
        super().__init__(time.monotonic)
        self.asked, self.answers = asyncio.Semaphore(0), None

    async def task(self, rollout_id):
        if self.answers is not None:
            self.asked.release()
            await self.answers.wait()
        return await super().task(rollout_id)


class Asked(MemoryPool):
    """Counts how often it is asked for a rollout."""

    def __init__(self):
        super().__init__(time.monotonic)
        self.asked = 0

    async def attempt(self, rollout_id, **kwargs):
        self.asked += 1
        return await super().attempt(rollout_id, **kwargs)


def test_a_previous_response_is_known_to_the_other_worker():
    async def steps(one, other, pool, engine):
        first = (await one.post("/v1/responses", json={"model": "any", "input": "Hello"})).json()
        body = {"model": "any", "input": "And?", "previous_response_id": first["id"]}
        assert (await other.post("/v1/responses", json=body)).status_code == 200
        assert [node.parent for node in (await pool.attempt(ROLLOUT.id)).nodes] == [None, 0]

    run(steps)


@pytest.mark.parametrize("fails", ["attempt", "append"])
def test_a_pool_that_fails_is_a_503_and_no_endless_trial(fails, monkeypatch):
    async def steps(one, other, pool, engine):
        for http in (one, other):
            assert (await chat(http, USER)).status_code == 200

        async def failing(*_, **__):
            raise PoolError("the disk is full")

        with monkeypatch.context() as patch:  # a pool that fails now and works later is no other seam's to give
            patch.setattr(pool, fails, failing)
            assert (await chat(one, USER)).status_code == 503
        assert (await chat(one, USER)).status_code == 200

    run(steps)
