"""Rollouts that come and go in one process, by the thousand: opened, answered, graded, ended, trained. It reports its size."""

import asyncio
import gc
import json
import sys
from functools import partial
from pathlib import Path

import psutil
from gateway_client import Client

from penstock.chat.renderer import Renderer
from penstock.gateway import app, auth, session, sources
from penstock.pool.base import Pool
from penstock.pool.sqlite import SqlitePool
from penstock.records import End, Grade, RolloutRef, Sampling, Task, make_rollout
from penstock.testing import GatewayFixture, ScriptedEngine, workbench

SIZE = 200
BOUND = 200
"""What a gateway remembers for good it remembers up to a bound of many thousands, which would take long to reach: all of them are
lowered here, since no seam leads to them."""


def lower_bounds() -> None:
    auth.MAX_CACHED_TOKENS = session.MAX_CLOSED = session.MAX_ADOPTED = BOUND
    app.ResponseCache = partial(app.ResponseCache, max_bytes=BOUND * 1000)  # type: ignore[misc]
    sources.RootCache = partial(sources.RootCache, max_tokens=BOUND * 100)  # type: ignore[misc]


async def live(bench: GatewayFixture, rollout: RolloutRef) -> None:
    """One rollout from its opening to its end."""
    session = bench.gateway.open(rollout, Sampling(max_tokens=64))
    status, _ = await Client(bench.gateway, session, messages=[{"role": "user", "content": f"{rollout.id}?"}]).answer()
    assert status == 200
    await bench.pool.grade(Grade(rollout_id=rollout.id, reward=1.0, source="test"))
    await bench.pool.end(rollout.id, End.COMPLETED)
    bench.gateway.close(rollout.id)


async def run_group(bench: GatewayFixture, pool: Pool, seq: int) -> None:
    rollouts = [make_rollout(f"train-{seq}", "t", place) for place in range(SIZE)]
    await pool.open_group(Task(id="t", prompt=({"role": "user", "content": "?"},)), rollouts, seq=seq)
    async with asyncio.TaskGroup() as group:
        for rollout in rollouts:
            group.create_task(live(bench, rollout))
    lease = await pool.claim(1, version=0, max_staleness=0, lease_s=60)
    assert lease is not None
    await pool.ack(lease.id, 1)


async def main(model: Path, folder: Path, rollouts: int) -> None:
    renderer, pool = Renderer.load(model), SqlitePool(folder)
    engine = ScriptedEngine(lambda prompt: "It is 42.", renderer.tokenizer, chunk=64)
    async with workbench(engine, renderer, pool=pool) as bench:
        for seq in range(rollouts // SIZE):
            await run_group(bench, pool, seq)
            engine.prompts.clear()
            engine.samplings.clear()
            gc.collect()
            print(json.dumps([(seq + 1) * SIZE, psutil.Process().memory_info().rss, sys.getallocatedblocks()]), flush=True)
    await pool.close()


if __name__ == "__main__":
    lower_bounds()
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
