"""How many rollouts of an evaluation run at once."""

import asyncio

from penstock.evals.run import PlannedRollout, run_planned
from penstock.pool.memory import MemoryPool
from penstock.records import End, Sampling, Task, make_rollout

COUNT, CONCURRENCY = 20, 4


class CountingRunner:
    """Runs rollouts one after the other, and records how many others it has when each one comes."""

    def __init__(self):
        self.running, self.seen = 0, []
        self.lock = asyncio.Lock()

    async def run(self, rollout, task, sampling):
        self.running += 1
        self.seen.append(self.running)
        async with self.lock:
            await asyncio.sleep(0)
        self.running -= 1
        return End.COMPLETED


def test_first_rollout_runs_alone_then_up_to_the_limit(tmp_path):
    async def main():
        runner, task = CountingRunner(), Task(id="t", prompt=())
        planned = [PlannedRollout(make_rollout(f"eval-{n}", "t", 0, channel="eval"), task) for n in range(COUNT)]
        await run_planned(planned, runner, MemoryPool(tmp_path), sampling=Sampling(), concurrency=CONCURRENCY, retries=0)
        return runner.seen

    seen = asyncio.run(main())
    assert len(seen) == COUNT and seen[:2] == [1, 1]
    assert max(seen) == CONCURRENCY
