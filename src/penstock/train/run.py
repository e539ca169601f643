"""One training run from start to end: opened or resumed, evaluated, trained, summed up."""

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from dataclasses import asdict, replace
from typing import Any, TypeVar

from penstock.codec import to_json
from penstock.config import RunConfig
from penstock.errors import ConfigError, PoolError, PoolFailed, TrainError
from penstock.events import Events, Listener
from penstock.records import PolicyVersion
from penstock.run.code import use_code
from penstock.run.folder import FRESH, locked, open_run_folder
from penstock.run.inputs import Inputs, refuse_untrainable
from penstock.run.notices import read_notices
from penstock.run.opening import bind_pool
from penstock.run.tracking import tracking
from penstock.system.async_tools import leaf_errors
from penstock.system.heap import share_heap
from penstock.train import policy
from penstock.train.branched import refuse_branches
from penstock.train.held_out import BackgroundEvaluation, evaluate
from penstock.train.loop import Fallback, TrainProgress, train_steps
from penstock.train.promotion import promote_if_better
from penstock.train.summary import Summary, finished_summary, summarize
from penstock.train.training_run import TrainingRun, open_training

T = TypeVar("T")


async def train(
    config: RunConfig,
    inputs: Inputs,
    *,
    listener: Listener,
    stop: asyncio.Event,
    fresh: bool = False,
    allow_code_change: bool = False,
) -> Summary:
    """Train as `config` says, or resume the run of that name; `stop` ends it after the running step.

    A run whose agent or grader was edited meanwhile is refused, unless `allow_code_change`.
    """
    refuse_untrainable(config)
    refuse_branches(config)
    if config.train.promote and not inputs.heldout:
        raise ConfigError("train.promote compares held-out rewards: name a file of held-out tasks with dataset.eval")
    share_heap()
    folder = open_run_folder(config, fresh=fresh)
    with locked(folder.path), Events(folder.events) as events:
        events.listen(listener)
        if done := await asyncio.to_thread(finished_summary, folder, config):
            return done
        use_code(folder, inputs.agent, events, allow_change=allow_code_change)
        async with tracking(config, folder, events):
            async with open_training(config, inputs, folder, events) as run:
                summary = await run_training(run, stop)
            summary = replace(summary, notices=await asyncio.to_thread(read_notices, folder.events))
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
    if text := policy.disk_problem(run.folder.checkpoints, run.config.train, run.learners):
        run.events.emit("notice", text=text)
    before = run.folder.evaluations().get("before-0")
    if progress.step == 0:  # else the start policy is not served any more
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
        if run.config.train.promote and after is not None:
            await promote_if_better(run, f"after-{progress.step}", progress.version)
    if stop.is_set():
        run.events.emit("run.stop", reason="asked to")
    return await summarize(run, progress, before, after)


async def refuse_another_run(run: TrainingRun) -> None:
    """Raises ConfigError if a new run finds groups of another one of its name, or a resumed one the pool of another."""
    if not run.folder.resumed and (groups := (await run.pool.stats()).groups):
        run.folder.discard_start()
        raise ConfigError(
            f"the pool at pool.url holds {groups} groups of another run called {run.config.run.name!r}; set another run.name"
        )
    await bind_pool(run.pool, run.folder)


async def resume(run: TrainingRun) -> TrainProgress:
    """Start, or continue from the newest intact checkpoint: its leases are acknowledged, later ones released or undone."""
    saved, fallback = await _find_checkpoint(run)
    progress = TrainProgress(fallback=fallback)
    if saved is not None:
        await _acknowledge(run, saved)
        await run.publisher.publish(saved.number, lambda: policy.restore(run.folder.checkpoints, saved, run.learners))
        progress = replace(progress, step=saved.step, version=saved.number)
    else:
        await run.publisher.begin()
    await run.pool.release()
    past = _keep_records(run, progress.step)
    run.rollouts.advance(progress.step)
    last_version = max(progress.version, (await run.pool.stats()).last_version)
    past = saved.past if saved and saved.past else past
    return replace(progress, last_version=last_version, past=past[-run.config.rollout.max_staleness - 1 :])


async def _find_checkpoint(run: TrainingRun) -> tuple[PolicyVersion | None, Fallback]:
    """Returns the newest intact checkpoint, None for a run that has trained nothing. TrainError if all that it trained is lost.

    Newer ones that are damaged are set aside, and groups that were trained into them are claimed again: their training is lost
    with the weights, as if the process had been killed before it saved them.
    """
    saved, damaged = await asyncio.to_thread(policy.find_intact, run.folder.checkpoints, run.folder.id)
    trained = await run.pool.trained()
    if saved is None and trained:
        found = "; ".join(f"{folder.name}: {problem}" for folder, problem in damaged.items()) or "there is none"
        raise TrainError(
            f"{run.folder.checkpoints}: no checkpoint is intact ({found}), and {len(trained)} groups were trained; "
            f"restore a copy of one, or {FRESH}"
        )
    for folder, problem in damaged.items():
        kept_as = policy.set_aside(folder).name
        text = f"checkpoint {folder} is damaged: {problem}; it is kept as {kept_as}"
        run.events.emit("checkpoint.damaged", folder=str(folder), problem=problem, kept_as=kept_as, text=text)
    number, step = (saved.number, saved.step) if saved else (0, 0)
    undone = await run.pool.undo(number)
    if damaged or undone:
        groups = [{"group_id": group_id, "version": version} for group_id, version in undone]
        text = f"the run goes on from step {step}: {len(undone)} groups that were trained into lost weights are trained again"
        run.events.emit("checkpoint.fallback", version=number, step=step, damaged=len(damaged), groups=groups, text=text)
    return saved, Fallback(len(damaged), len(undone))


async def _acknowledge(run: TrainingRun, saved: PolicyVersion) -> None:
    try:
        for lease in saved.leases:
            await run.pool.ack(lease, saved.number)
    except PoolFailed:
        raise
    except PoolError as cause:
        raise TrainError(
            f"{policy.folder_of(run.folder.checkpoints, saved)} and the run's pool do not belong together ({cause}); "
            f"restore the pool, or {FRESH}"
        ) from cause


def _keep_records(run: TrainingRun, step: int) -> tuple[int, ...]:
    """Drop metrics and evaluations of what was undone, and what is damaged; returns the versions after each step that is left."""
    for problem in run.folder.set_aside_damaged():
        run.events.emit("record.damaged", text=problem)
    kept = run.folder.keep_metrics(step)
    run.folder.keep_evaluations(step)
    if lacking := step - len(kept):
        text = f"metrics.jsonl is damaged: it lacks {lacking} of {step} steps, and so do the rewards and counts of the summary"
        run.events.emit("record.damaged", text=text)
    if step and run.inputs.heldout and "before-0" not in run.folder.evaluations():
        text = "evals.json is damaged: the evaluation before training is lost, and cannot be made any more"
        run.events.emit("record.damaged", text=text)
    return (0, *(entry["version"] for entry in kept))


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
