"""Rollouts that come and go: what a gateway keeps of them does not grow with their number."""

import asyncio
import gc

import pytest
from gateway_client import USER, Client

from penstock.chat.renderer import Renderer
from penstock.records import End, Sampling, Task, make_rollout
from penstock.testing import ScriptedEngine, memory_pool, workbench, write_tokenizer

BATCH = 150


class Forgetful:
    """A pool that drops a rollout with its end, so that what is left is the gateway's own."""

    def __init__(self):
        self.inner = memory_pool()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def renew_all(self):
        self.inner = memory_pool()


@pytest.mark.slow
def test_rollouts_that_ended_leave_nothing_behind(tmp_path):
    renderer = Renderer.load(write_tokenizer(tmp_path))
    engine = ScriptedEngine(lambda prompt: "It is 42.", renderer.tokenizer)
    sizes = []

    async def main():
        pool = Forgetful()
        async with workbench(engine, renderer, pool=pool) as bench:
            for batch in range(8):
                rollouts = [make_rollout(f"train-{batch}", "t", place) for place in range(BATCH)]
                await pool.open_group(Task(id="t", prompt=(USER,)), rollouts, seq=batch)
                for rollout in rollouts:
                    session = bench.gateway.open(rollout, Sampling(max_tokens=64))
                    question = {"role": "user", "content": f"{rollout.id}?"}
                    for stream in (False, True):
                        assert (await Client(bench.gateway, session, messages=[question], stream=stream).answer())[0] == 200
                    await pool.end(rollout.id, End.COMPLETED)
                    bench.gateway.close(rollout.id)
                engine.prompts.clear()
                engine.samplings.clear()
                pool.renew_all()
                del session
                gc.collect()
                sizes.append(len(gc.get_objects()))

    asyncio.run(main())
    print(f"objects after each {BATCH} rollouts: {sizes}")
    per_rollout = (sizes[-1] - sizes[1]) / (len(sizes) - 2) / BATCH
    assert per_rollout < 8  # its two answers and its prompt are kept for retries and neighbours, up to a bound of their own
