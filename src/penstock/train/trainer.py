"""One training run from start to end: opened or resumed, evaluated, trained, summarized."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Generator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import orjson

from penstock.codec import from_json, to_json
from penstock.config import RunConfig
from penstock.errors import ConfigError, PoolError, PoolFailed, TrainError
from penstock.events import Events, Listener
from penstock.records import PolicyVersion
from penstock.run.folder import FRESH, RunFolder, code_changes, locked, open_run_folder, use_code
from penstock.run.inputs import Inputs, refuse_untrainable
from penstock.run.opening import bind_pool
from penstock.run.shortfalls import add_shortfalls, read_notices, read_shortfalls, shortfalls_json
from penstock.run.tracking import tracking
from penstock.system.async_tools import leaf_errors
from penstock.system.processes import share_heap
from penstock.train import checkpoints
from penstock.train.algorithm import refuse_branches
from penstock.train.evaluation import BackgroundEvaluation, evaluate, evaluations_during_training
from penstock.train.loop import train_steps
from penstock.train.monitoring import FIRST, LAST, why_idle
from penstock.train.resources import Fallback, TrainingRun, TrainProgress, open_training

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    name: str
    folder: str
    status: str
    """"finished", or "stopped" if it can be resumed."""
    steps: int
    first_reward: float | None
    """Mean over the first 32 graded rollouts."""
    last_reward: float | None
    """Mean over the last 64 graded rollouts."""
    graded: int | None = None
    """Graded rollouts of the trained steps; None of a run that an earlier penstock summed up."""
    eval_before: float | None
    eval_after: float | None
    evals: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """Held-out rewards during training, by step; None where an evaluation was skipped or failed."""
    exact_token_rate: float | None
    """Share of sampled tokens that are trained under exactly the context they were sampled under; None before the first."""
    rollouts: int
    sampled_tokens: int
    trained_tokens: int
    train_seconds: float
    """Of rollouts and updates, evaluation and loading left out."""
    policy_version: int
    checkpoint: str | None
    ends: dict[str, int]
    """How the training rollouts ended, attempts that a kill cut off included."""
    shortfalls: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """How many of the trained groups' rollouts failed, were not graded, and were wrong (below `eval.passes`), with the reason."""
    inexact: dict[str, int] = field(default_factory=dict[str, int])
    """The sampled tokens that are not exact, by reason."""
    unhashed_tokens: int = 0
    """Of the exact ones, those recorded without a digest of their context."""
    behaviour_unknown_tokens: int = 0
    """Sampled tokens whose engine did not tell the probabilities that it sampled with; see `train.unknown_logprobs`."""
    recomputed_tokens: int = 0
    """Of those, the ones that were trained with the trainer's own."""
    masked: dict[str, int] = field(default_factory=dict[str, int])
    """Steps of graded rollouts that were not trained, by reason."""
    notices: dict[str, int] = field(default_factory=dict[str, int])
    """What the gateway did not do as agents asked, by name: capped lengths, replies that were cut, ignored fields."""
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    """How often a caller's messages were rendered again although the rollout had earlier steps, by reason."""
    checkpoints_damaged: int = 0
    """Checkpoints that were damaged on disk and passed over; the run went on from an earlier one."""
    groups_undone: int = 0
    """Groups that were trained into those, and therefore again."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Groups that were taken out of training, by reason."""
    updates: int | None = None
    """Steps that published a version; None of a run that an earlier penstock summed up."""
    stalled: str = ""
    """Why the last steps made no update, and what to do; empty if the last one did."""
    alarms: list[str] = field(default_factory=list[str])
    """What was raised, with the step; see `train.on_alarm`."""
    stopped_by: str = ""
    """The alarms that stopped it; empty if none did."""
    code_changes: list[str] = field(default_factory=list[str])
    """When the author's code changed while the run went on, and in which files."""
    peak_memory_mb: float | None = None
    """The most memory that the trainer's process took: of the GPU or, on a CPU, of the machine."""
    resumed: bool = False
    already_finished: bool = False


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
    if text := checkpoints.disk_problem(run.folder.checkpoints, run.config.train, run.learners):
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
        await run.publisher.publish(saved.number, lambda: checkpoints.restore(run.folder.checkpoints, saved, run.learners))
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
    saved, damaged = await asyncio.to_thread(checkpoints.find_intact, run.folder.checkpoints, run.folder.id)
    trained = await run.pool.trained()
    if saved is None and trained:
        found = "; ".join(f"{folder.name}: {problem}" for folder, problem in damaged.items()) or "there is none"
        raise TrainError(
            f"{run.folder.checkpoints}: no checkpoint is intact ({found}), and {len(trained)} groups were trained; "
            f"restore a copy of one, or {FRESH}"
        )
    for folder, problem in damaged.items():
        kept_as = checkpoints.set_aside(folder).name
        text = f"checkpoint {folder} is damaged: {problem}; it is kept as {kept_as}"
        run.events.emit("checkpoint.damaged", folder=str(folder), problem=problem, kept_as=kept_as, text=text)
    number, step = (saved.number, saved.step) if saved else (0, 0)
    undone = await run.pool.undo(number)
    if damaged or undone:
        groups = [{"group_id": group_id, "version": version} for group_id, version in undone]
        text = f"the run resumes at step {step}: {len(undone)} groups that were trained into lost weights are trained again"
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
            f"{checkpoints.folder_of(run.folder.checkpoints, saved)} and the run's pool do not belong together ({cause}); "
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
    """Raise the first of an exception group's errors alone: the others followed from it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise next(leaf_errors(group)) from None


async def summarize(run: TrainingRun, progress: TrainProgress, before: float | None, after: float | None) -> Summary:
    metrics = run.folder.metrics()
    stats = await run.pool.stats("train")
    rewards = [reward for entry in metrics for reward in entry["rewards"]]
    sampled = sum(entry["sampled_tokens"] for entry in metrics)
    saved = checkpoints.latest(run.folder.checkpoints)
    done = progress.step >= run.config.train.steps and (after is not None or not run.inputs.heldout)
    return Summary(
        name=run.config.run.name,
        folder=str(run.folder.path),
        status="finished" if done else "stopped",
        steps=progress.step,
        first_reward=mean(rewards[:FIRST]),
        last_reward=mean(rewards[-LAST:]),
        graded=len(rewards),
        eval_before=before,
        eval_after=after,
        evals=evaluations_during_training(run.folder.evaluations()),
        exact_token_rate=sum(entry["exact_tokens"] for entry in metrics) / sampled if sampled else None,
        rollouts=stats.rollouts,
        sampled_tokens=sampled,
        trained_tokens=sum(entry["trained_tokens"] for entry in metrics),
        train_seconds=round(sum(entry["rollout_s"] + entry["train_s"] for entry in metrics), 1),
        policy_version=progress.version,
        checkpoint=str(checkpoints.folder_of(run.folder.checkpoints, saved)) if saved else None,
        ends=stats.ends,
        shortfalls=shortfalls_json(add_shortfalls(read_shortfalls(entry.get("shortfalls")) for entry in metrics)),
        inexact=_total_counts(metrics, "inexact"),
        unhashed_tokens=sum(entry.get("unhashed_tokens", 0) for entry in metrics),
        behaviour_unknown_tokens=sum(entry.get("behaviour_unknown_tokens", 0) for entry in metrics),
        recomputed_tokens=sum(entry.get("recomputed_tokens", 0) for entry in metrics),
        masked=_total_counts(metrics, "masked"),
        breaks=stats.breaks,
        checkpoints_damaged=sum(entry.get("checkpoints_damaged", 0) for entry in metrics),
        groups_undone=sum(entry.get("groups_undone", 0) for entry in metrics),
        dropped=stats.drops,
        peak_memory_mb=max((entry["peak_memory_mb"] for entry in metrics if entry.get("peak_memory_mb")), default=None),
        updates=sum(new != old for old, new in pairwise([0, *(entry["version"] for entry in metrics)])),
        stalled=why_idle(metrics),
        alarms=[f"{kind} at step {entry['step']}" for entry in metrics for kind in entry.get("alarms", ())],
        stopped_by=", ".join(metrics[-1].get("alarms", ())) if metrics and not done and run.config.train.on_alarm != "warn" else "",
        code_changes=[change.text for change in code_changes(run.folder)],
        resumed=run.folder.resumed,
    )


def finished_summary(folder: RunFolder, config: RunConfig) -> Summary | None:
    """Returns the summary of a run that has nothing left to do, else None."""
    try:
        done = from_json(Summary, orjson.dumps(folder.summary()))
    except (ConfigError, ValueError):  # none yet, or damaged: it can be made again
        return None
    if done.status != "finished" or done.steps < config.train.steps:
        return None
    saved, damaged = checkpoints.find_intact(folder.checkpoints, folder.id)
    if damaged or (saved and saved.number != done.policy_version):  # its result is not there any more
        return None
    return replace(done, checkpoint=done.checkpoint if saved else None, already_finished=True)


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _total_counts(metrics: list[dict[str, Any]], name: str) -> dict[str, int]:
    """Returns the sums over all steps of counts by reason; entries of an earlier penstock may lack them."""
    total: Counter[str] = Counter()
    for entry in metrics:
        total.update(entry.get(name, {}))
    return dict(total)
