"""The side of a run that makes rollouts, as its trainer sees it: engine, gateway, runner, scheduler, in this process or another."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.config import RunConfig, run_secrets
from penstock.engines.base import Engine
from penstock.events import Events
from penstock.gateway.app import Gateway
from penstock.gateway.call import GatewayLimits
from penstock.gateway.observability import open_tracer
from penstock.gateway.sources import open_engine
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Sampling
from penstock.rollout.runner import Runner, open_runner
from penstock.rollout.scheduler import Scheduler, run_once
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs


class Rollouts(Protocol):
    """What a trainer asks of that side."""

    async def run(self) -> None:
        """Make rollouts until all steps are trained or `stop` is called."""
        ...

    def advance(self, steps_trained: int) -> None:
        """Say how many steps have been trained: how far ahead rollouts may be made follows from it."""
        ...

    def stop(self) -> None:
        """Let `run` return; what still runs is opened again for a later run."""
        ...

    async def evaluate(self) -> list[str]:
        """Try each held-out task once, at the evaluation's own sampling; the ids of the rollouts, in the order of the tasks."""
        ...

    async def load(self, version: int, folder: Path) -> None:
        """Sample with the weights of a model folder, as `version`, from the next token on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRollouts:
    """That side in this process."""

    config: RunConfig
    inputs: Inputs
    pool: Pool
    engine: Engine
    runner: Runner
    scheduler: Scheduler

    async def run(self) -> None:
        await self.scheduler.run()

    def advance(self, steps_trained: int) -> None:
        self.scheduler.advance(steps_trained)

    def stop(self) -> None:
        self.scheduler.stop()

    async def evaluate(self) -> list[str]:
        return await run_once(
            self.inputs.heldout,
            self.runner,
            pool=self.pool,
            sampling=sampling(self.config, temperature=self.config.sampling.eval_temperature),
            limits=self.config.rollout,
        )

    async def load(self, version: int, folder: Path) -> None:
        await self.engine.load(version, folder)


@asynccontextmanager
async def open_rollouts(
    config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events, pool: Pool
) -> AsyncGenerator[LocalRollouts]:
    """Open engine, gateway and runner for `config`, in the order of the data's way; all are closed on leaving, the last first."""
    async with AsyncExitStack() as stack:
        events.emit("stage", text=f"loading {inputs.model}")
        engine, renderer = await open_engine(config.engine, inputs.folder, name=inputs.model, seed=config.run.seed)
        stack.push_async_callback(engine.close)
        tracer = await stack.enter_async_context(open_tracer(config.gateway.otel, model=engine.model))
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
                limits=GatewayLimits.of(config.gateway),
                tracer=tracer,
                secrets=run_secrets(),
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
        gateway.reward_function = runner.judge
        scheduler = _scheduler(config, inputs, runner, pool, events)
        yield LocalRollouts(config=config, inputs=inputs, pool=pool, engine=engine, runner=runner, scheduler=scheduler)


def sampling(config: RunConfig, *, temperature: float) -> Sampling:
    """What holds for calls that do not say otherwise."""
    given = config.sampling
    return Sampling(max_tokens=given.max_tokens, temperature=temperature, top_p=given.top_p, top_k=given.top_k, min_p=given.min_p)


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


def open_pool(config: RunConfig, folder: RunFolder) -> Pool:
    """The run's pool; close it after use."""
    return POOLS.load(config.pool.name)(folder.path, url=config.pool.url)
