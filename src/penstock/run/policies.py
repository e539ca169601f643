"""The policies of a run: `[policies.*]` checked, their models found, and what serves each of them opened."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from penstock.chat.renderer import Renderer
from penstock.config import EngineSection, RunConfig
from penstock.engines import ENGINES
from penstock.engines.base import AdapterEngine, Engine, SampledChunk, has_adapters, open_engine
from penstock.engines.checkpoint_files import find_base, is_adapter, refuse_damaged_weights
from penstock.errors import ConfigError
from penstock.events import Listener
from penstock.gateway.sources import ServedPolicy, load_renderer
from penstock.models import ModelFolder, find_cached, resolve
from penstock.records import Sampling


def trained_policies(config: RunConfig) -> list[str]:
    """The names of the policies that are trained; empty in a run without `[policies.*]`."""
    return [name for name, policy in config.policies.items() if not policy.frozen]


def saved_adapters(config: RunConfig) -> dict[str, Path]:
    """The folders of the policies' adapters where `model.name` is a checkpoint of several policies, to be evaluated; else empty."""
    checkpoint = Path(config.model.name).expanduser()
    folders = {name: checkpoint / name for name in config.policies}
    return {name: folder for name, folder in folders.items() if is_adapter(folder)}


def refuse_untrainable_policies(config: RunConfig) -> None:
    """Raises ConfigError if there are policies, and they cannot be trained as configured."""
    if not config.policies:
        return
    trained = trained_policies(config)
    if not trained:
        raise ConfigError("every one of [policies.*] is frozen, so there is nothing to train; remove frozen from one of them")
    if config.train.method != "lora":
        raise ConfigError(
            f'[policies.*] train one adapter each on the weights of [model] ({", ".join(trained)}); set train.method = "lora"'
        )
    if saved_adapters(config):
        text = f"model.name = {config.model.name!r} is a checkpoint of several policies, which can be evaluated"
        raise ConfigError(f"{text}; to train, name the model that they are adapters of")
    if config.scale.name != "none":
        raise ConfigError(f"scale.name = {config.scale.name!r} trains one policy; leave [policies.*] or scale.name out")


def check_policy(config: RunConfig, name: str) -> None:
    """Raises ConfigError if what serves a policy cannot be found, as far as that is known without asking a server."""
    policy = config.policies[name]
    if policy.engine is not None:
        ENGINES.check(policy.engine.name)
        if policy.engine.text_only and not policy.model:
            raise ConfigError(f"policies.{name}.model is missing: name the model that {policy.engine.name!r} is to be asked for")
    elif policy.model and not config.engine.in_process:
        text = f"policies.{name}.model: the servers of [engine] hold the weights of [model]"
        raise ConfigError(f"{text}; say with [policies.{name}.engine] where this model is served")
    if policy.model and not (policy.engine and policy.engine.text_only):
        find_cached(policy.model)


def pull_policies(config: RunConfig, listener: Listener) -> None:
    """Download the models of frozen policies that are not here yet, and ask their servers whether they serve them."""
    for name, policy in config.policies.items():
        if (section := _own_engine(config, name)) is not None:
            model = policy.model or config.model.name
            section.preflight(model if section.text_only else pull(model, listener).name)


def start_model(config: RunConfig, listener: Listener) -> ModelFolder:
    """The model that the run begins with: `model.name`, or the base of the adapters in that checkpoint."""
    if adapters := saved_adapters(config):
        return ModelFolder(name=Path(config.model.name).name, path=find_base(next(iter(adapters.values()))))
    return pull(config.model.name, listener)


def pull(model: str, listener: Listener) -> ModelFolder:
    """Find a model on this machine, or download it."""

    def report(stage: str, done: int = 0, total: int | None = None) -> None:
        listener("stage", {"text": stage, "done": done, "total": total})

    return find_cached(model) or resolve(model, report)


def run_engine(config: RunConfig, engine: Engine) -> Engine:
    """The engine of the run, with the version that its trained policies have."""
    trained = trained_policies(config)
    return PolicyEngine(engine, trained[0]) if trained and has_adapters(engine) else engine


@asynccontextmanager
async def open_policies(config: RunConfig, engine: Engine, renderer: Renderer | None) -> AsyncGenerator[dict[str, ServedPolicy]]:
    """Opens what serves each policy next to the run's `engine`, and closes it on leaving; empty without `[policies.*]`."""
    versioned, served = run_engine(config, engine), dict[str, ServedPolicy]()
    async with AsyncExitStack() as stack:
        for name, folder in saved_adapters(config).items():
            if not has_adapters(engine):
                raise ConfigError(f"engine.name = {config.engine.name!r} takes no adapters; name another")
            await asyncio.to_thread(refuse_damaged_weights, folder.parent)
            await engine.load(0, folder, policy=name)
        for name, policy in config.policies.items():
            shown, its_renderer = engine, renderer
            if (section := _own_engine(config, name)) is not None:
                model = policy.model or config.model.name
                folder = ModelFolder(name=model, path=Path()) if section.text_only else find_cached(model) or resolve(model)
                its_renderer = await load_renderer(section, folder.path)
                decode = its_renderer and its_renderer.tokenizer.decode
                shown = await open_engine(section, folder.path, name=folder.name, seed=config.run.seed, decode=decode)
                stack.push_async_callback(shown.close)
            if its_renderer is not None and policy.frozen:
                shown = FrozenEngine(shown, lambda: versioned.version)
            elif its_renderer is not None and has_adapters(engine):
                shown = PolicyEngine(engine, name)
            served[name] = ServedPolicy(shown, its_renderer, default=policy.default)
        yield served


def _own_engine(config: RunConfig, name: str) -> EngineSection | None:
    """The section of the engine that serves this policy alone; None if the run's engine does."""
    policy = config.policies[name]
    return policy.engine or (config.engine if policy.model else None)


class PolicyEngine:
    """See `Engine`: an engine with several adapters, asked for one policy's. Its owner closes it and publishes weights."""

    def __init__(self, engine: AdapterEngine, policy: str) -> None:
        self._engine, self._policy = engine, policy

    @property
    def model(self) -> str:
        return self._engine.model

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def version(self) -> int:
        return self._engine.version_of(self._policy)

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        return self._engine.generate(prompt_ids, sampling, rollout_id=rollout_id, policy=self._policy)

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        await self._engine.swap(version, change)

    async def load(self, version: int, folder: Path) -> None:
        await self._engine.load(version, folder, policy=self._policy)

    async def close(self) -> None: ...


class FrozenEngine:
    """See `Engine`: an engine whose weights never change. Its tokens carry the version that the trained policies have meanwhile.

    A version of a run names the weights of all its policies, so this is the one that sampled them; and tokens of a frozen policy do
    not make a group look stale.
    """

    def __init__(self, engine: Engine, version: Callable[[], int]) -> None:
        self._engine, self._version = engine, version

    @property
    def model(self) -> str:
        return self._engine.model

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def version(self) -> int:
        return self._version()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        async with aclosing(self._engine.generate(prompt_ids, sampling, rollout_id=rollout_id)) as chunks:
            async for chunk in chunks:
                yield replace(chunk, versions=(self._version(),) * len(chunk.ids))

    async def swap(self, version: int, change: Callable[[], None]) -> None: ...

    async def load(self, version: int, folder: Path) -> None: ...

    async def close(self) -> None: ...
