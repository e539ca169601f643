"""Opens what training and evaluation both need to make rollouts: pool, engine, gateway and runner."""

import asyncio
import secrets
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.config import RunConfig, home_folder, run_secrets
from penstock.engines.base import Engine, open_engine
from penstock.events import Events
from penstock.gateway.app import Gateway
from penstock.gateway.auth import Access
from penstock.gateway.observability import open_tracer
from penstock.gateway.request import GatewayLimits
from penstock.gateway.sources import load_renderer
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.pool.location import refuse_foreign_pool
from penstock.pool.rows import PictureStore
from penstock.records import Sampling
from penstock.rollout.runner import Runner, open_runner
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs, long_prompts
from penstock.run.policies import open_policies, run_engine
from penstock.sdk.discovery import Agent


class RolloutRunner(NamedTuple):
    """A runner, and the engine that its agents' model calls reach through the gateway."""

    engine: Engine
    runner: Runner


def open_pool(config: RunConfig, folder: RunFolder) -> Pool:
    """Returns the run's pool. The caller closes it."""
    return POOLS.load(config.pool.name)(folder.path, url=config.pool.url)


async def bind_pool(pool: Pool, folder: RunFolder) -> None:
    """Mark a new pool as that of the run in `folder`; ConfigError if it belongs to another run."""
    await refuse_foreign_pool(pool, folder.path)
    if folder.id:
        await pool.set_run_id(folder.id)


@asynccontextmanager
async def open_rollout_runner(
    config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events, pool: Pool
) -> AsyncGenerator[RolloutRunner]:
    """Open engine, gateway and runner; they are closed on leaving, in reverse order."""
    async with AsyncExitStack() as stack:
        events.emit("stage", text=f"loading {inputs.model}")
        renderer = await load_renderer(config.engine, inputs.folder)
        decode = renderer and renderer.tokenizer.decode
        engine = await open_engine(config.engine, inputs.folder, name=inputs.model, seed=config.run.seed, decode=decode)
        stack.push_async_callback(engine.close)
        if renderer is not None and (length := getattr(engine, "context_length", 0)):
            for path, tasks in inputs.files(config):
                if text := await asyncio.to_thread(long_prompts, tasks, renderer.root, length, path):
                    events.emit("notice", text=text)
        policies = await stack.enter_async_context(open_policies(config, engine, renderer))
        tracer = await stack.enter_async_context(open_tracer(config.gateway.otel, model=engine.model))
        gateway = await stack.enter_async_context(
            Gateway(
                run_engine(config, engine),
                renderer,
                pool,
                secret=secrets.token_bytes(32),  # in memory only: a later process replaces the rollouts that it finds unfinished
                host=config.gateway.host,
                port=config.gateway.port,
                hosts=config.gateway.hosts,
                events=events,
                limits=GatewayLimits.of(config.gateway),
                tracer=tracer,
                secrets=run_secrets(),
                closed=_closed_routes(inputs.agent),
                policies=policies,
                pictures=PictureStore(folder.path),
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
                hidden=hidden_files(config, folder, inputs.agent),
            )
        )
        gateway.reward_function = runner.compute_reward
        yield RolloutRunner(engine, runner)


def hidden_files(config: RunConfig, folder: RunFolder, agent: Agent) -> list[Path]:
    """Returns what no agent may read: the runs, whose pools have labels and other rollouts, the datasets, and our keys."""
    runs, needed = folder.path.resolve().parent, [agent.entry, agent.source.folder, Path.cwd(), Path(sys.prefix)]
    runs = runs.parent if runs.name in ("evals", "branches") else runs
    # All runs next to this one, if that folder holds nothing that the agent needs.
    own = folder.path if any(path.resolve().is_relative_to(runs) for path in needed) else runs
    return [own, *(path for path in (config.dataset.train, config.dataset.eval) if path), home_folder()]


def _closed_routes(agent: Agent) -> set[Access]:
    """The routes that nobody but a thief of the key could call. A flow has a token for the flow routes."""
    if agent.graded_by_run:
        return {Access.CONTROL, Access.FLOW}
    return {Access.CONTROL} if agent.trusted else set()


def sampling(config: RunConfig, *, temperature: float) -> Sampling:
    """Returns the sampling of model calls that set none of their own."""
    section = config.sampling
    return Sampling(
        max_tokens=section.max_tokens, temperature=temperature, top_p=section.top_p, top_k=section.top_k, min_p=section.min_p
    )
