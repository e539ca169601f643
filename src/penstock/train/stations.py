"""The stations of one training run, opened in the order of the data's way and closed in the reverse."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from penstock.config import RunConfig
from penstock.engines import ENGINES
from penstock.engines.base import Engine
from penstock.engines.embedded.weights import load_decoder
from penstock.events import Events
from penstock.gateway.app import Gateway
from penstock.gateway.calls import Limits
from penstock.gateway.spans import open_spans
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Group, Sampling
from penstock.render.renderer import Renderer
from penstock.rollout.runner import Runner, open_runner
from penstock.rollout.scheduler import Scheduler
from penstock.train.advantages import ADVANTAGES
from penstock.train.folder import RunFolder
from penstock.train.inputs import Inputs
from penstock.train.learner import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Stations:
    """Everything that a training step touches."""

    config: RunConfig
    inputs: Inputs
    folder: RunFolder
    events: Events
    pool: Pool
    engine: Engine
    runner: Runner
    scheduler: Scheduler
    learner: Learner
    advantage: Callable[[Group], list[float]]


@asynccontextmanager
async def open_stations(config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events) -> AsyncGenerator[Stations]:
    """Open pool, engine, gateway, runner and learner for `config`; all of them are closed on leaving, the last opened first."""
    async with AsyncExitStack() as stack:
        pool: Pool = POOLS.load(config.pool.name)(folder.path, url=config.pool.url)
        stack.push_async_callback(pool.close)
        events.emit("stage", text=f"loading {inputs.model}")
        renderer = await asyncio.to_thread(Renderer.load, inputs.folder)
        engine = await _open_engine(config, inputs, renderer)
        stack.push_async_callback(engine.close)
        spans = await stack.enter_async_context(open_spans(config.gateway.otel, model=engine.model))
        gateway = await stack.enter_async_context(
            Gateway(
                engine,
                renderer,
                pool,
                secret=folder.secret(),
                host=config.gateway.host,
                port=config.gateway.port,
                hosts=config.gateway.hosts,
                events=events,
                limits=Limits.of(config.gateway),
                spans=spans,
            )
        )
        runner = await stack.enter_async_context(
            open_runner(
                inputs.agent,
                gateway=gateway,
                pool=pool,
                events=events,
                limits=config.rollout,
                section=inputs.executor,
                artifacts=folder.path / "artifacts",
            )
        )
        decoder = getattr(engine, "decoder", None) or await asyncio.to_thread(load_decoder, inputs.folder)
        yield Stations(
            config=config,
            inputs=inputs,
            folder=folder,
            events=events,
            pool=pool,
            engine=engine,
            runner=runner,
            scheduler=_scheduler(config, inputs, runner, pool, events),
            learner=Learner(decoder, config.train),
            advantage=ADVANTAGES.load(config.train.advantage),
        )


def sampling(config: RunConfig, *, temperature: float) -> Sampling:
    """What holds for calls that do not say otherwise."""
    given = config.sampling
    return Sampling(max_tokens=given.max_tokens, temperature=temperature, top_p=given.top_p, top_k=given.top_k, min_p=given.min_p)


async def _open_engine(config: RunConfig, inputs: Inputs, renderer: Renderer) -> Engine:
    opener = ENGINES.load(config.engine.name)
    return await asyncio.to_thread(
        opener, inputs.folder, name=inputs.model, section=config.engine, seed=config.run.seed, decode=renderer.tokenizer.decode
    )


def _scheduler(config: RunConfig, inputs: Inputs, runner: Runner, pool: Pool, events: Events) -> Scheduler:
    return Scheduler(
        inputs.tasks,
        runner,
        pool=pool,
        events=events,
        limits=config.rollout,
        sampling=sampling(config, temperature=config.sampling.temperature),
        seed=config.run.seed,
        shuffle=config.dataset.shuffle,
        steps=config.train.steps,
    )
