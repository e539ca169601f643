"""All that a training step uses: pool, rollouts, learners and publisher, opened in the order of the data and closed in reverse."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from penstock.config import RunConfig
from penstock.engines.base import Engine, has_adapters
from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.engine import EmbeddedEngine, end_ids
from penstock.engines.embedded.sampling import FixedChoice, GrammarCompiler, allowed_rows
from penstock.engines.servers.vllm import VllmEngine
from penstock.engines.token_sets import pack_set
from penstock.errors import ConfigError, PenstockError, TrainError
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.records import BranchPoint, Step
from penstock.rollout.branches import run_branches
from penstock.rollout.runner import Runner
from penstock.rollout.scheduler import Scheduler, run_once
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.run.opening import open_pool, open_rollout_runner, sampling
from penstock.run.policies import trained_policies
from penstock.train.algorithm import Advantage, load_advantage
from penstock.train.device import load_learner_decoder, memory_split, refuse_learner_settings, sleeping
from penstock.train.learner import Learner, make_learner
from penstock.train.publishing import (
    AdapterPublisher,
    FolderPublisher,
    InPlacePublisher,
    PolicyPublishers,
    Publisher,
    ServerPublisher,
    publication_ways,
)
from penstock.train.sequences import ReplayedStep
from penstock.train.teachers import open_teacher


class RolloutSource(Protocol):
    """What makes rollouts for the trainer: in this process (`LocalRollouts`) or in another one (`scale`)."""

    async def run(self) -> None:
        """Make rollouts until all steps are trained or `stop` is called."""
        ...

    def advance(self, steps_trained: int) -> None:
        """Set the number of trained steps, which bounds how far ahead rollouts are made."""
        ...

    def stop(self) -> None:
        """Let `run` return; rollouts that still run are reopened for a later run."""
        ...

    async def evaluate(self) -> list[str]:
        """Run each held-out task once, at the evaluation temperature; returns the rollout ids in the order of the tasks."""
        ...

    async def load(self, version: int, folder: Path) -> None:
        """Sample with the weights of a model folder, as `version`, from the next token on."""
        ...

    async def branch(self, points: Sequence[BranchPoint]) -> list[str]:
        """Make `rollout.branches` continuations from each point; returns the ids of their rollouts. Those that ended stay."""
        ...

    def resting(self) -> AbstractAsyncContextManager[None]:
        """While an update is computed: servers sleep where `engine.sleep` asks for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRollouts:
    """A `RolloutSource` in this process: engine, runner and scheduler."""

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

    async def branch(self, points: Sequence[BranchPoint]) -> list[str]:
        asked = sampling(self.config, temperature=self.config.sampling.temperature)
        return await run_branches(points, self.runner, pool=self.pool, sampling=asked, limits=self.config.rollout)

    async def load(self, version: int, folder: Path) -> None:
        await self.engine.load(version, folder)

    def resting(self) -> AbstractAsyncContextManager[None]:
        if isinstance(self.engine, VllmEngine) and getattr(self.config.engine, "sleep", False):
            return sleeping(self.engine)
        return nullcontext()


MAX_SHARED_SETS = 4096
"""Sets that are kept so that equal ones share their memory: most tokens of JSON are chosen from one of few sets."""


class AllowedReplay:
    """Finds the tokens that each sampled token was chosen from, by replaying its grammar or the caller's choice."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._grammars, self._ends = GrammarCompiler(folder, vocab_size), end_ids(folder)
        self._vocab_size = vocab_size
        self._sets: dict[bytes, bytes] = {}

    def __call__(self, step: Step) -> ReplayedStep:
        if step.sampling.biased:
            return self._fixed(step)
        if step.sampling.grammar is None:
            return ReplayedStep()
        try:
            state = self._grammars.start(step.sampling.grammar, self._ends.union(step.sampling.stop_ids))
        except PenstockError:
            return ReplayedStep(problem="grammar_unknown")
        sets: list[bytes] = []
        for token_id in step.completion_ids:
            (row,) = allowed_rows([state], self._vocab_size)
            if state.problem or token_id >= self._vocab_size or not row[token_id]:
                return ReplayedStep(problem="not_allowed")
            sets.append(self._shared(pack_set(row)))
            state.advance(token_id)
        return ReplayedStep(tuple(sets))

    def _fixed(self, step: Step) -> ReplayedStep:
        allowed = FixedChoice(step.sampling, self._vocab_size).allowed
        if not all(token_id < self._vocab_size and allowed[token_id] for token_id in step.completion_ids):
            return ReplayedStep(problem="not_allowed")
        return ReplayedStep((self._shared(pack_set(allowed)),) * len(step.completion_ids))

    def _shared(self, packed: bytes) -> bytes:
        if len(self._sets) >= MAX_SHARED_SETS:
            self._sets.clear()
        return self._sets.setdefault(packed, packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """All that a training step uses."""

    config: RunConfig
    inputs: Inputs
    folder: RunFolder
    events: Events
    pool: Pool
    rollouts: RolloutSource
    publisher: Publisher
    learners: Mapping[str, Learner]
    """By policy; one under the empty name in a run without `[policies.*]`."""
    advantage: Advantage
    replay: AllowedReplay


class Fallback(NamedTuple):
    """Counts what damaged checkpoints cost when the run was resumed."""

    checkpoints_damaged: int = 0
    groups_undone: int = 0
    """Groups that were trained into them."""


NO_FALLBACK = Fallback()


@dataclass(frozen=True, slots=True)
class TrainProgress:
    step: int = 0
    version: int = 0
    last_version: int = 0
    """The highest version ever served, even if a kill lost its weights: a number is never reused."""
    leases: tuple[str, ...] = ()
    """Leases that are trained but not yet in a checkpoint."""
    past: tuple[int, ...] = (0,)
    """The versions after each of the last `max_staleness` + 1 steps; `version` is the last."""
    fallback: Fallback = NO_FALLBACK
    """Not yet in the metrics of a step."""


@asynccontextmanager
async def open_training(config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events) -> AsyncGenerator[TrainingRun]:
    """Open pool, rollouts and learner in this process; they are closed on leaving, in reverse order."""
    async with AsyncExitStack() as stack:
        pool = open_pool(config, folder)
        stack.push_async_callback(pool.close)
        rollouts = await stack.enter_async_context(open_rollouts(config, inputs, folder, events, pool))
        shared = getattr(rollouts.engine, "decoder", None)
        refuse_learner_settings(config, shared=shared is not None)
        decoder = shared or await asyncio.to_thread(load_learner_decoder, config, inputs.folder)
        learners = await asyncio.to_thread(open_learners, decoder, config, inputs)
        whole, engine, publisher = learners.get(""), rollouts.engine, None
        if isinstance(engine, VllmEngine) and getattr(config.engine, "sleep", False):
            if config.train.updates_per_step > 1:
                raise ConfigError("engine.sleep: set train.updates_per_step = 1; later updates are computed between publications")
            await engine.refuse_sleepless()
        if shared is None:
            trained = sum(learner.size for learner in learners.values())
            for text in await asyncio.to_thread(memory_split, decoder, trained):
                events.emit("stage", text=text)
            if config.train.method == "lora":
                names = f"{len(learners)} adapters" if len(learners) > 1 else "an adapter"
                events.emit("stage", text=f"{trained / 1e6:,.0f} MB of weights go to the servers as {names}, by name")
        if isinstance(engine, VllmEngine) and whole is not None and whole.adapter is None:
            ways = await publication_ways(config, engine, decoder, folder)
            publisher = ServerPublisher(engine, whole, model=inputs.folder, ways=ways, events=events)
            stack.push_async_callback(publisher.close)
        yield TrainingRun(
            config=config,
            inputs=inputs,
            folder=folder,
            events=events,
            pool=pool,
            rollouts=rollouts,
            publisher=publisher or _publisher(learners, rollouts.engine, inputs.folder, folder.path / "served"),
            learners=learners,
            advantage=load_advantage(config.train),
            replay=AllowedReplay(inputs.folder, decoder.shape.vocab_size),
        )


def _publisher(learners: Mapping[str, Learner], engine: Engine, model: Path, scratch: Path) -> Publisher:
    whole = learners.get("")
    if isinstance(engine, EmbeddedEngine):
        return InPlacePublisher(engine, whole) if whole and whole.adapter is None else AdapterPublisher(engine, learners)
    in_use = getattr(engine, "folders_in_use", tuple)
    if whole is not None:
        return FolderPublisher(whole, model=model, scratch=scratch, load=engine.load, in_use=in_use)
    if not has_adapters(engine):
        raise ConfigError(f"{engine.model}: this engine serves one policy; for [policies.*] name another with engine.name")
    return PolicyPublishers(
        FolderPublisher(learner, model=model, scratch=scratch / policy, load=partial(engine.load, policy=policy), in_use=in_use)
        for policy, learner in learners.items()
    )


def open_learners(decoder: Decoder, config: RunConfig, inputs: Inputs) -> dict[str, Learner]:
    """Make a learner for each trained policy, all on the tensors of `decoder`; one under the empty name without `[policies.*]`."""
    learners = dict[str, Learner]()
    for name in trained_policies(config):
        lr = config.policies[name].lr
        train = config.train if lr is None else config.train.model_copy(update={"lr": lr})
        learners[name] = open_learner(decoder, config.model_copy(update={"train": train}), inputs)
    return learners or {"": open_learner(decoder, config, inputs)}


def open_learner(decoder: Decoder, config: RunConfig, inputs: Inputs) -> Learner:
    """Make the learner of a run. If `decoder` is in bfloat16, its masters are read from the start policy's files."""
    section = config.train
    advantage = load_advantage(section)
    teacher = None
    if "teacher" in advantage.needs:
        teacher = open_teacher(advantage.settings, inputs.folder, like=decoder.embed.weight)
    try:
        return make_learner(decoder, section, inputs.folder, seed=config.run.seed, teacher=teacher)
    except torch.OutOfMemoryError as cause:
        raise TrainError(
            "the GPU's memory is too small for the trainer's copy of the weights; set engine.cache_tokens to less, "
            "or end other programs that use the GPU"
        ) from cause


@asynccontextmanager
async def open_rollouts(
    config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events, pool: Pool
) -> AsyncGenerator[LocalRollouts]:
    """Open the rollout side of a training run in this process."""
    async with open_rollout_runner(config, inputs, folder, events, pool) as (engine, runner):
        scheduler = Scheduler(
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
        yield LocalRollouts(config=config, inputs=inputs, pool=pool, engine=engine, runner=runner, scheduler=scheduler)
