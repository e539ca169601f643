"""AsyncTrainer: an actor that has the learner, and trains on what a rollouter elsewhere puts into the pool."""

import asyncio
import os
from contextlib import AsyncExitStack

import torch

from penstock.codec import to_json
from penstock.config import RunConfig
from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.engine import pick_device, pick_dtype
from penstock.engines.embedded.weights import load_decoder
from penstock.run.inputs import Inputs
from penstock.run.opening import open_pool
from penstock.scale.actor_calls import EventBuffer, get_actor
from penstock.scale.remote_rollouts import RemoteRollouts
from penstock.scale.run_spec import RunSpec, exclusive_process
from penstock.train.advantages import ADVANTAGES
from penstock.train.learner import Learner
from penstock.train.policy import FolderPublisher
from penstock.train.run import run_training
from penstock.train.training_run import TrainingRun


class AsyncTrainer:
    """A process that Ray started anew goes on from the last checkpoint, like a run that was killed and started again."""

    def __init__(self, folder: str, rollouter: str, synchronizer: str) -> None:
        self._sent = RunSpec.read(folder)
        self._rollouter, self._synchronizer = rollouter, synchronizer
        self._telling = EventBuffer()
        self._stop = asyncio.Event()

    async def run(self, *, resumed: bool) -> bytes:
        """Train to the end, or until `stop`; the run's summary, as JSON."""
        self._telling.open()
        self._telling.events.emit("trainer.start", pid=os.getpid())
        torch.set_num_threads(self._sent.threads)
        config, folder = self._sent.make_config(), self._sent.make_folder(resumed=resumed)
        inputs = self._sent.make_inputs(config)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(exclusive_process(folder.path / ".trainer.lock"))
            pool = open_pool(config, folder)
            stack.push_async_callback(pool.close)
            learner = Learner(await asyncio.to_thread(_decoder, config, inputs), config.train)
            rollouts = RemoteRollouts(get_actor(self._rollouter), get_actor(self._synchronizer), self._telling.events)
            await rollouts.begin()
            stations = TrainingRun(
                config=config,
                inputs=inputs,
                folder=folder,
                events=self._telling.events,
                pool=pool,
                rollouts=rollouts,
                publisher=FolderPublisher(learner, model=inputs.folder, scratch=folder.path / "served", load=rollouts.load),
                learner=learner,
                advantage=ADVANTAGES.load(config.train.advantage),
            )
            return to_json(await run_training(stations, self._stop))

    async def stop(self) -> None:
        """Let `run` end after the running step."""
        self._stop.set()

    async def ready(self) -> None:
        """Answer, as any process can that has started."""

    async def told(self) -> list[bytes]:
        """Events since the last call."""
        return await self._telling.told()

    async def close(self) -> None:
        self._telling.close()


def _decoder(config: RunConfig, inputs: Inputs) -> Decoder:
    device = pick_device(config.engine.device)
    return load_decoder(inputs.folder, device=device, dtype=pick_dtype(config.engine.dtype, device))
