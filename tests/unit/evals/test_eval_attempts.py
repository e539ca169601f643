"""How many attempts of an evaluation are handed over at once."""

import asyncio

from penstock.evals.attempts import PlannedAttempt, run_attempts
from penstock.pool.memory import MemoryPool
from penstock.records import End, Sampling, Task, make_rollout

PLACES, AT_ONCE, SPARE = 20, 4, 2


class Counted:
    """Runs rollouts one after the other, and notes how many others are with it when each one comes."""

    def __init__(self):
        self.here, self.found = 0, []
        self.one = asyncio.Lock()

    async def run(self, rollout, task, sampling):
        self.here += 1
        self.found.append(self.here)
        async with self.one:
            await asyncio.sleep(0)
        self.here -= 1
        return End.COMPLETED


def test_spare_attempts_wait_with_the_runner_until_the_last_ones_which_may_all_begin_at_once(tmp_path):
    async def main():
        runner, task = Counted(), Task(id="t", prompt=())
        places = [PlannedAttempt(make_rollout(f"eval-{n}", "t", 0, channel="eval"), task) for n in range(PLACES)]
        await run_attempts(
            places, runner, MemoryPool(tmp_path), sampling=Sampling(), concurrency=AT_ONCE, retries=0, first_alone=1, prefetch=SPARE
        )
        return runner.found

    found = asyncio.run(main())
    assert len(found) == PLACES and found[0] == 1
    assert max(found[:-AT_ONCE]) == AT_ONCE + SPARE
    assert max(found[-AT_ONCE:]) <= AT_ONCE
