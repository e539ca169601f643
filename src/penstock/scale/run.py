"""A training run on Ray: the driver, which starts the actors, relays their events, and resumes after one died."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from penstock.codec import from_json, to_json
from penstock.config import RunConfig
from penstock.errors import ConfigError, TrainError
from penstock.events import Events, Listener
from penstock.pool import POOLS
from penstock.run.folder import RunFolder, locked, open_run_folder, use_code
from penstock.run.inputs import Inputs, refuse_untrainable
from penstock.run.shortfalls import read_notices
from penstock.run.tracking import tracking
from penstock.scale.actor_calls import MAX_DEATHS, Actor, ActorGone, call_result, relay_events, wait_restarted
from penstock.scale.cluster import STORE_BYTES, on_node, open_cluster, own_node, own_node_id
from penstock.scale.executor import RaySection
from penstock.scale.package import ray
from penstock.scale.rollouter import AsyncRollouter
from penstock.scale.run_spec import RunSpec
from penstock.scale.trainer import FILES, AsyncTrainer, ParameterSynchronizer
from penstock.system.async_tools import leaf_errors
from penstock.train.algorithm import refuse_branches
from penstock.train.trainer import Summary, finished_summary

COPIES = 3
"""Copies of the weights in the object store at once: the version that is served, the one that comes, and one on its way."""
CLOSE_S = 10.0


class Actors(NamedTuple):
    """The processes of a run."""

    trainer: Actor
    rollouter: Actor


async def train_on_ray(
    config: RunConfig,
    inputs: Inputs,
    *,
    listener: Listener,
    stop: asyncio.Event,
    fresh: bool = False,
    allow_code_change: bool = False,
) -> Summary:
    """As `penstock.train.trainer.train`, with rollouts and training in processes of a Ray cluster."""
    refuse_unscalable(config, inputs)
    folder = open_run_folder(config, fresh=fresh)
    with locked(folder.path), Events(folder.events) as events:
        events.listen(listener)
        if done := await asyncio.to_thread(finished_summary, folder, config):
            return done
        use_code(folder, inputs.agent, events, allow_change=allow_code_change)
        events.emit("stage", text="starting Ray" if not config.scale.address else f"connecting to Ray at {config.scale.address}")
        async with tracking(config, folder, events):
            with open_cluster(config.scale.address, namespace=f"penstock-{config.run.name}", store_bytes=_store_bytes(inputs)):
                async with open_actors(config, inputs, folder, events) as actors:
                    summary = await supervise(actors, stop, events, resumed=folder.resumed)
            summary = replace(summary, notices=await asyncio.to_thread(read_notices, folder.events))
            folder.write_summary(to_json(summary))
            events.emit("run.end", summary=asdict(summary))
        return summary


def refuse_unscalable(config: RunConfig, inputs: Inputs) -> None:
    """ConfigError for what has no meaning in several processes: a pool that one of them sees, an executor's own cluster."""
    refuse_untrainable(config)
    refuse_branches(config)
    if not POOLS.load(config.pool.name).shareable:
        raise ConfigError(
            f"pool.name = {config.pool.name!r} is for one process, and scale.name = 'ray' has several; use 'sqlite' or 'postgres'"
        )
    if isinstance(inputs.executor, RaySection) and inputs.executor.address:
        raise ConfigError(
            "executor.address has no meaning with scale.name = 'ray': agents are on the run's cluster; set scale.address"
        )


@asynccontextmanager
async def open_actors(config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events) -> AsyncGenerator[Actors]:
    """Start the actors on this node, where the run's folder is, and relay their events; they are killed on leaving."""
    sent = RunSpec.of(config, inputs, folder, threads=torch.get_num_threads()).write()
    names = [f"{role}-{secrets.token_hex(4)}" for role in ("rollouter", "synchronizer", "trainer")]
    rollouter_gpus, trainer_gpus = gpu_shares(config, int(own_node()["Resources"].get("GPU", 0)))
    rollouter = _start(AsyncRollouter, names[0], sent, num_gpus=rollouter_gpus)
    synchronizer = _start(ParameterSynchronizer, names[1], names[0])
    trainer = _start(AsyncTrainer, names[2], sent, *names[:2], num_gpus=trainer_gpus)
    try:
        async with asyncio.TaskGroup() as group:
            relays = [group.create_task(relay_events(actor, events)) for actor in (rollouter, trainer)]
            try:
                yield Actors(trainer, rollouter)
                await _close(rollouter, trainer)
                await asyncio.wait(relays, timeout=CLOSE_S)
            finally:
                for each in relays:
                    each.cancel()
    except BaseExceptionGroup as several:
        raise next(leaf_errors(several)) from None
    finally:
        for actor in (trainer, rollouter, synchronizer):
            ray.kill(actor)


async def supervise(actors: Actors, stop: asyncio.Event, events: Events, *, resumed: bool) -> Summary:
    """Run the trainer to its end; after a death it continues from its checkpoint. TrainError if it keeps dying."""
    deaths = DeathCounter()
    events.listen(deaths)
    stopping = asyncio.create_task(_forward_stop(stop, actors.trainer))
    try:
        while True:
            try:
                return from_json(Summary, await call_result(actors.trainer.run.remote(resumed=resumed)))
            except ActorGone as gone:
                resumed, deaths.in_a_row = True, deaths.in_a_row + 1
                reason = str(gone).splitlines()[0]
                events.emit("trainer.lost", message=reason, in_a_row=deaths.in_a_row)
                if deaths.in_a_row > MAX_DEATHS:
                    count = deaths.in_a_row
                    raise TrainError(
                        f"the trainer died {count} times without a step of training: {reason}; see Ray's logs"
                    ) from gone
                await wait_restarted(actors.trainer)
                if stop.is_set():
                    actors.trainer.stop.remote()
    finally:
        stopping.cancel()


class DeathCounter:
    """A listener of events that counts deaths of the trainer; a trained step resets the count."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "train.step":
            self.in_a_row = 0


def gpu_shares(config: RunConfig, gpus: int) -> tuple[float, float]:
    """Returns the GPUs of rollouter and trainer: one each where there are two, else half of the only one."""
    if not gpus or config.engine.device == "cpu":
        return 0.0, 0.0
    if not config.engine.in_process:
        return 0.0, 1.0
    return (1.0, 1.0) if gpus > 1 else (0.5, 0.5)


def _start(cls: type[Any], name: str, *arguments: str, num_gpus: float = 0.0) -> Actor:
    options = {"name": name, "num_cpus": 0, "num_gpus": num_gpus, "max_restarts": -1, "scheduling_strategy": on_node(own_node_id())}
    return ray.remote(cls).options(**options).remote(*arguments)


async def _forward_stop(stop: asyncio.Event, trainer: Actor) -> None:
    await stop.wait()
    trainer.stop.remote()  # if it is dead now, `supervise` repeats this after its restart


async def _close(*actors: Actor) -> None:
    for actor in actors:
        try:
            async with asyncio.timeout(CLOSE_S):
                await call_result(actor.close.remote())
        except (TimeoutError, ActorGone):  # nothing can be lost any more: the summary has arrived
            continue


def _store_bytes(inputs: Inputs) -> int:
    weights = sum(file.stat().st_size for file in inputs.folder.iterdir() if file.suffix in FILES)
    return STORE_BYTES + COPIES * weights
