"""The stations of one training run, opened in the order of the data's way and closed in the reverse."""

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from dataclasses import asdict, replace
from typing import Any, TypeVar

from penstock.codec import to_json
from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.events import Events, Listener
from penstock.rollout.author_tasks import leaves
from penstock.run.folder import locked, open_run_folder
from penstock.run.inputs import Inputs, refuse_untrainable
from penstock.train import policy
from penstock.train.held_out import BackgroundEvaluation, evaluate
from penstock.train.loop import TrainProgress, train_steps
from penstock.train.summary import Summary, finished_summary, summarize
from penstock.train.training_run import TrainingRun, open_training

T = TypeVar("T")


async def train(config: RunConfig, inputs: Inputs, *, listener: Listener, stop: asyncio.Event, fresh: bool = False) -> Summary:
    """Train as `config` says, or take up the run of that name where it was left; `stop` ends it after the running step."""
    refuse_untrainable(config)
    folder = open_run_folder(config, fresh=fresh)
    with locked(folder.path), Events(folder.events) as events:
        events.listen(listener)
        if done := finished_summary(folder, config):
            return done
        async with open_training(config, inputs, folder, events) as stations:
            summary = await run_training(stations, stop)
        folder.write_summary(to_json(summary))
        events.emit("run.end", summary=asdict(summary))
        return summary


async def run_training(s: TrainingRun, stop: asyncio.Event) -> Summary:
    """Held-out evaluation, training with evaluations beside it, evaluation again; what an earlier process did is not repeated."""
    await refuse_another_run(s)
    progress = await resume(s)
    s.events.emit(
        "run.start",
        name=s.config.run.name,
        folder=str(s.folder.path),
        model=s.inputs.model,
        steps=s.config.train.steps,
        first_step=progress.step + 1,
        resumed=s.folder.resumed,
    )
    before = await _unless_stopped(stop, evaluate(s, "before", 0))
    with _raise_first():
        async with asyncio.TaskGroup() as group:
            group.create_task(s.rollouts.run())
            beside = BackgroundEvaluation(s, group)
            progress = await train_steps(s, progress, stop, beside)
            s.rollouts.stop()
            await _unless_stopped(stop, beside.finish())
            beside.cancel()
    after = None
    if progress.step >= s.config.train.steps:
        after = await _unless_stopped(stop, evaluate(s, "after", progress.step))
    if stop.is_set():
        s.events.emit("run.stop", reason="asked to")
    return await summarize(s, progress, before, after)


async def refuse_another_run(s: TrainingRun) -> None:
    """A new run must not go on with what another of its name left in a database that several share."""
    if not s.folder.resumed and (groups := (await s.pool.stats()).groups):
        s.folder.forget()
        raise ConfigError(
            f"the pool at pool.url holds {groups} groups of another run called {s.config.run.name!r}; set another run.name"
        )


async def resume(s: TrainingRun) -> TrainProgress:
    """Begin, or go on from the last checkpoint: what it holds is acknowledged, what was trained after it is given back."""
    saved = policy.latest(s.folder.checkpoints)
    progress = TrainProgress()
    if saved is not None:
        for lease in saved.leases:
            await s.pool.ack(lease, saved.number)
        await s.publisher.publish(saved.number, lambda: policy.restore(s.folder.checkpoints, saved, s.learner))
        progress = TrainProgress(saved.step, saved.number)
    else:
        await s.publisher.begin()
    await s.pool.release()
    versions = [0, *(entry["version"] for entry in s.folder.keep_metrics(progress.step))]
    s.folder.keep_evaluations(progress.step)
    s.rollouts.advance(progress.step)
    last_version = max(progress.version, (await s.pool.stats()).last_version)
    return replace(progress, last_version=last_version, past=tuple(versions[-s.config.rollout.max_staleness - 1 :]))


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives; None where `stop` came first, and `work` was cancelled."""
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
    """Of several errors that ended the run, raise the first by itself: the others followed from it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from None
