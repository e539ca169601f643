"""A stream that is cut anywhere, by anyone: what is recorded reports this, and nothing but a whole reply looks like one."""

import asyncio
import random

import pytest
from gateway_client import RETRY, Client, GatedPool
from killable_process import FULL

from penstock.gateway import GatewayLimits
from penstock.records import End
from penstock.testing import ScriptedEngine, ScriptedReply, memory_pool, workbench
from penstock.train.sequences import exactness

REPLY = "It is 42, as it always was, " * 2
PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"]
ENDS = {PATHS[0]: b"[DONE]", PATHS[1]: b"message_stop", PATHS[2]: b"response.completed", PATHS[3]: b"[DONE]"}
POINTS = 200 if FULL else 60


def client(bench, session, path, *headers, stream=True):
    asked = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1024, "stream": stream}
    if path.endswith("responses"):
        asked = {"messages": None, "input": "?", "stream": stream}
    if path.endswith("/v1/completions"):
        asked = {"messages": None, "prompt": "?", "stream": stream}
    return Client(bench.gateway, session, path=path, headers=headers, **asked)


async def engine_fails(case):
    await case.caller.task


async def caller_hangs_up(case):
    await case.engine.stalled.wait()
    case.caller.hang_up()
    await case.caller.task


async def rollout_ends(case):
    await case.engine.stalled.wait()
    await case.bench.pool.end(case.session.rollout_id, End.CANCELLED, "stopped")
    case.bench.gateway.close(case.session.rollout_id)
    await case.caller.task


async def disk_is_full(case):
    await case.engine.stalled.wait()
    case.bench.pool.full = True
    case.engine.release()
    await case.caller.task
    case.bench.pool.full = False


FAULTS = {
    "engine fails": ("fail_after", engine_fails, {"error"}),
    "engine ends without a word": ("cut_after", engine_fails, {"error"}),
    "engine stalls": ("stall_after", engine_fails, {"error"}),
    "caller hangs up": ("stall_after", caller_hangs_up, {"cancelled"}),
    "rollout ends": ("stall_after", rollout_ends, set()),
    "disk is full": ("stall_after", disk_is_full, set()),
}


class Case:
    def __init__(self, bench, session, engine, caller):
        self.bench, self.session, self.engine, self.caller = bench, session, engine, caller


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_stream_cut_anywhere_is_never_taken_for_whole_one(renderer, fault):
    kind, cause, finishes = FAULTS[fault]
    chance = random.Random(fault)
    size = len(renderer.tokenizer.encode(REPLY))
    reported = {"partial": 0, "nothing": 0, "recovered": 0}

    async def one(point, path):
        limits = GatewayLimits(stall_s=0.02, first_token_s=0.02) if fault == "engine stalls" else GatewayLimits()
        engine = ScriptedEngine([ScriptedReply(REPLY, **{kind: point}), REPLY], renderer.tokenizer)
        async with workbench(engine, renderer, pool=GatedPool(memory_pool()), limits=limits) as bench:
            session = await bench.rollout()
            caller = client(bench, session, path)
            await asyncio.wait_for(cause(Case(bench, session, engine, caller)), 20)
            assert ENDS[path] not in caller.body
            assert caller.sent or fault == "caller hangs up"
            attempt = await bench.attempt(session)
            assert {step.finish for step in attempt.steps} <= finishes
            assert all(len(step.completion_ids) == len(step.logprobs) <= point for step in attempt.steps)
            reported["partial" if attempt.steps else "nothing"] += 1
            assert (engine.running, exactness(attempt).sampled_tokens) == (0, sum(len(s.completion_ids) for s in attempt.steps))
            if fault != "rollout ends":
                again = client(bench, session, path, RETRY)
                status, body = await again.answer()
                assert (status, ENDS[path] in body) == (200, True)
                (whole,) = [step for step in (await bench.attempt(session)).steps if step.finish == "stop"]
                assert whole.message["content"] == REPLY
                reported["recovered"] += 1

    async def main():
        for _ in range(POINTS):
            await one(chance.randrange(size), chance.choice(PATHS))

    asyncio.run(main())
    print(f"{fault}: {POINTS} cuts, {reported}")
    assert reported["recovered"] == (0 if fault == "rollout ends" else POINTS)
