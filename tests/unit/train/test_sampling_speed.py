"""The speed in a step's line: tokens that the pool got, over the whole time since the last step."""

import asyncio

from penstock.pool.base import PoolStats
from penstock.train.metrics import SamplingSpeed


class CountingPool:
    """A pool that was given so many tokens."""

    tokens = 500

    async def stats(self, channel: str) -> PoolStats:
        assert channel == "train"
        return PoolStats(tokens=self.tokens)


def test_step_whose_tokens_were_sampled_before_it_has_no_speed():
    async def main() -> None:
        pool, now = CountingPool(), asyncio.get_running_loop().time
        begun = now()
        speed = await SamplingSpeed.begin(pool)  # pyright: ignore[reportArgumentType]
        between = now()
        await asyncio.sleep(0.01)
        pool.tokens += 1000
        inner = now() - between
        first = await speed.lap()
        assert 1000 / (now() - begun) - 0.1 <= first <= 1000 / inner + 0.1
        assert await speed.lap() == 0.0

    asyncio.run(main())
