"""AsyncTrainer: an actor with the learner, which trains on the groups that a rollouter elsewhere puts into the pool."""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from penstock.codec import to_json
from penstock.config import RunConfig
from penstock.engines.embedded.decoder import MODEL_SUFFIXES, Decoder, load_decoder
from penstock.engines.embedded.engine import pick_device, pick_dtype
from penstock.errors import TrainError
from penstock.run.inputs import Inputs
from penstock.run.opening import open_pool
from penstock.scale.actor_calls import MAX_DEATHS, ActorGone, EventBuffer, call_result, get_actor, wait_restarted
from penstock.scale.package import ray
from penstock.scale.remote_rollouts import RemoteRollouts
from penstock.scale.run_spec import RunSpec, exclusive_process
from penstock.train.algorithm import load_advantage
from penstock.train.publishing import FolderPublisher
from penstock.train.resources import AllowedReplay, TrainingRun, open_learner
from penstock.train.trainer import run_training


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


FILES = (*MODEL_SUFFIXES, ".safetensors")
"""How the names of a model folder's files end."""


class ParameterSynchronizer:
    """It outlives trainer and rollouter, so that one that comes back finds the weights here, in the cluster's object store."""

    def __init__(self, rollouter: str) -> None:
        self._rollouter = rollouter
        self._files: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        """A call of a trainer that died ends before the next trainer's begins."""

    async def publish(self, version: int, folder: str) -> None:
        """Hold the files of a model folder and load them into the rollouter as `version`; returns once they are served."""
        async with self._turn:
            self._files = await asyncio.to_thread(_put, Path(folder))
            await self._load(version)

    async def _load(self, version: int) -> None:
        rollouter = get_actor(self._rollouter)
        for _ in range(MAX_DEATHS):
            try:
                await call_result(rollouter.load.remote(version, list(self._files), *self._files.values()))
                return
            except ActorGone:  # it restarts without these weights
                await wait_restarted(rollouter)
        raise TrainError(f"policy version {version} reached no rollouter: {MAX_DEATHS} died over it; see Ray's logs")


def _put(folder: Path) -> dict[str, Any]:
    return {file.name: ray.put(file.read_bytes()) for file in sorted(folder.iterdir()) if file.suffix in FILES}
