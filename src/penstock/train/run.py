"""One training run from start to end: opened or resumed, evaluated, trained, summed up."""

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from dataclasses import asdict, replace
from typing import Any, TypeVar

from penstock.codec import to_json
from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.events import Events, Listener
from penstock.run.folder import locked, open_run_folder
from penstock.run.inputs import Inputs, refuse_untrainable
from penstock.system.async_tools import leaf_errors
from penstock.train import policy
from penstock.train.held_out import BackgroundEvaluation, evaluate
from penstock.train.loop import TrainProgress, train_steps
from penstock.train.summary import Summary, finished_summary, summarize
from penstock.train.training_run import TrainingRun, open_training

T = TypeVar("T")


async def train(config: RunConfig, inputs: Inputs, *, listener: Listener, stop: asyncio.Event, fresh: bool = False) -> Summary:
    """Train as `config` says, or resume the run of that name; `stop` ends it after the running step."""
    refuse_untrainable(config)
    folder = open_run_folder(config, fresh=fresh)
    with locked(folder.path), Events(folder.events) as events:
        events.listen(listener)
        if done := finished_summary(folder, config):
            return done
        async with open_training(config, inputs, folder, events) as run:
            summary = await run_training(run, stop)
        folder.write_summary(to_json(summary))
        events.emit("run.end", summary=asdict(summary))
        return summary


async def run_training(run: TrainingRun, stop: asyncio.Event) -> Summary:
    """Evaluate, train with evaluations in the background, evaluate again; what an earlier process did is not repeated."""
    await refuse_another_run(run)
    progress = await resume(run)
    run.events.emit(
        "run.start",
        name=run.config.run.name,
        folder=str(run.folder.path),
        model=run.inputs.model,
        steps=run.config.train.steps,
        first_step=progress.step + 1,
        resumed=run.folder.resumed,
    )
    before = await _unless_stopped(stop, evaluate(run, "before", 0))
    with _raise_first():
        async with asyncio.TaskGroup() as group:
            group.create_task(run.rollouts.run())
            background = BackgroundEvaluation(run, group)
            progress = await train_steps(run, progress, stop, background)
            run.rollouts.stop()
            await _unless_stopped(stop, background.finish())
            background.cancel()
    after = None
    if progress.step >= run.config.train.steps:
        after = await _unless_stopped(stop, evaluate(run, "after", progress.step))
    if stop.is_set():
        run.events.emit("run.stop", reason="asked to")
    return await summarize(run, progress, before, after)


async def refuse_another_run(run: TrainingRun) -> None:
    """Raises ConfigError if a new run finds groups of another one of its name, in a database that several runs share."""
    if not run.folder.resumed and (groups := (await run.pool.stats()).groups):
        run.folder.discard_start()
        raise ConfigError(
            f"the pool at pool.url holds {groups} groups of another run called {run.config.run.name!r}; set another run.name"
        )


async def resume(run: TrainingRun) -> TrainProgress:
    """Start, or continue from the last checkpoint: its leases are acknowledged, leases taken after it are released."""
    saved = policy.latest(run.folder.checkpoints)
    progress = TrainProgress()
    if saved is not None:
        for lease in saved.leases:
            await run.pool.ack(lease, saved.number)
        await run.publisher.publish(saved.number, lambda: policy.restore(run.folder.checkpoints, saved, run.learner))
        progress = TrainProgress(saved.step, saved.number)
    else:
        await run.publisher.begin()
    await run.pool.release()
    versions = [0, *(entry["version"] for entry in run.folder.keep_metrics(progress.step))]
    run.folder.keep_evaluations(progress.step)
    run.rollouts.advance(progress.step)
    last_version = max(progress.version, (await run.pool.stats()).last_version)
    return replace(progress, last_version=last_version, past=tuple(versions[-run.config.rollout.max_staleness - 1 :]))


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`; None if `stop` was set first, and `work` is then cancelled."""
    job, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({job, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return job.result() if job.done() else None
    finally:
        stopped.cancel()
        if not job.done():
            job.cancel()
            await asyncio.wait({job})


@contextlib.contextmanager
def _raise_first() -> Generator[None]:
    """Raise the first of an exception group's errors by itself: the others followed from it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise next(leaf_errors(group)) from None
