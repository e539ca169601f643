"""What tests of evaluations share."""

import asyncio
from pathlib import Path

from penstock.evals.outcome import open_evaluation
from penstock.records import Rollout


def attempts(folder: Path) -> list[Rollout]:
    """Those of an evaluation that count, by row and place."""

    async def read() -> list[Rollout]:
        async with open_evaluation(folder) as found:
            return [attempt async for group in found.groups() for attempt in group.rollouts]

    return asyncio.run(read())
