"""Everything that a training step touches, opened in the order of the data and closed in reverse."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from penstock.config import RunConfig
from penstock.engines.embedded.weights import load_decoder
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.records import Group
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.run.opening import Rollouts, open_pool, open_rollouts
from penstock.train.advantages import ADVANTAGES
from penstock.train.learner import Learner
from penstock.train.policy import FromDisk, InPlace, Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Everything that a training step touches."""

    config: RunConfig
    inputs: Inputs
    folder: RunFolder
    events: Events
    pool: Pool
    rollouts: Rollouts
    publisher: Publisher
    learner: Learner
    advantage: Callable[[Group], list[float]]


@asynccontextmanager
async def open_training(config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events) -> AsyncGenerator[TrainingRun]:
    """Open pool, rollouts and learner for `config`, all in this process; they are closed on leaving, the last opened first."""
    async with AsyncExitStack() as stack:
        pool = open_pool(config, folder)
        stack.push_async_callback(pool.close)
        rollouts = await stack.enter_async_context(open_rollouts(config, inputs, folder, events, pool))
        shared = getattr(rollouts.engine, "decoder", None)
        learner = Learner(shared or await asyncio.to_thread(load_decoder, inputs.folder), config.train)
        from_disk = FromDisk(learner, model=inputs.folder, scratch=folder.path / "served", load=rollouts.load)
        yield TrainingRun(
            config=config,
            inputs=inputs,
            folder=folder,
            events=events,
            pool=pool,
            rollouts=rollouts,
            publisher=InPlace(rollouts.engine) if shared else from_disk,
            learner=learner,
            advantage=ADVANTAGES.load(config.train.advantage),
        )
