"""AsyncTrainer: an actor with the learner, which trains on the groups that a rollouter elsewhere puts into the pool."""

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
from penstock.train.algorithm import load_advantage
from penstock.train.allowed import AllowedReplay
from penstock.train.policy import FolderPublisher
from penstock.train.run import run_training
from penstock.train.training_run import TrainingRun, open_learner


class AsyncTrainer:
    """When Ray restarts its process, it continues from the last checkpoint, like a run that was killed and started again."""

    def __init__(self, folder: str, rollouter: str, synchronizer: str) -> None:
        self._spec = RunSpec.read(folder)
        self._rollouter, self._synchronizer = rollouter, synchronizer
        self._events = EventBuffer()
        self._stop = asyncio.Event()

    async def run(self, *, resumed: bool) -> bytes:
        """Train to the end, or until `stop`; returns the run's summary as JSON."""
        self._events.open()
        self._events.events.emit("trainer.start", pid=os.getpid())
        torch.set_num_threads(self._spec.threads)
        config, folder = self._spec.make_config(), self._spec.make_folder(resumed=resumed)
        inputs = self._spec.make_inputs(config)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(exclusive_process(folder.path / ".trainer.lock"))
            pool = open_pool(config, folder)
            stack.push_async_callback(pool.close)
            learner = await asyncio.to_thread(lambda: open_learner(_decoder(config, inputs), config, inputs))
            rollouts = RemoteRollouts(get_actor(self._rollouter), get_actor(self._synchronizer), self._events.events)
            await rollouts.begin()
            training = TrainingRun(
                config=config,
                inputs=inputs,
                folder=folder,
                events=self._events.events,
                pool=pool,
                rollouts=rollouts,
                publisher=FolderPublisher(learner, model=inputs.folder, scratch=folder.path / "served", load=rollouts.load),
                learners={"": learner},
                advantage=load_advantage(config.train),
                replay=AllowedReplay(inputs.folder, learner.decoder.shape.vocab_size),
            )
            return to_json(await run_training(training, self._stop))

    async def stop(self) -> None:
        """Let `run` end after the running step."""
        self._stop.set()

    async def ready(self) -> None:
        """Returns once the process has started."""

    async def take_events(self) -> list[bytes]:
        """Returns the events since the last call."""
        return await self._events.take()

    async def close(self) -> None:
        self._events.close()


def _decoder(config: RunConfig, inputs: Inputs) -> Decoder:
    device = pick_device(config.train.device if config.train.device != "auto" else config.engine.device)
    dtype = config.train.dtype if config.train.dtype != "auto" else config.engine.dtype
    return load_decoder(inputs.folder, device=device, dtype=pick_dtype(dtype, device))
