"""The training algorithm: claim, credit, pack, update, publish, save.

    lease      = pool.claim(groups whose rollouts have all ended)      while leased, no other trainer gets them
                 with_branches(lease.groups)                           continuations, where the advantage compares them
    sequences  = credit_groups(lease.groups)                           advantages, then the paths of each token graph
    update     = learner.compute(pack(sequences))                      gradients; shared prefixes are forwarded once
                 set_aside(groups that make it fail)                   and claim again
    publisher.publish(version + 1, learner.apply)                      the engine changes policy between two tokens
    save_checkpoint(), pool.ack(lease)                                 from here on, these groups are never trained again

Meanwhile the scheduler makes rollouts, no further ahead than `rollout.max_staleness` allows. A kill at any point leaves the last
checkpoint and unacknowledged leases. The next process releases those leases and trains their groups again, from the checkpoint.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.errors import TrainError, one_line
from penstock.records import BranchPoint, Group, PolicyVersion, Rollout
from penstock.rollout.branches import spread_calls
from penstock.system.heap import trim_heap
from penstock.train.batches import Batch
from penstock.train.checkpoints import checkpoint_interval, save
from penstock.train.claims import (
    CRASHED,
    claim,
    find_culprits,
    may_be_data,
    refuse_too_many,
    set_aside,
)
from penstock.train.credit import CreditedSequences, credit_groups
from penstock.train.evaluation import BackgroundEvaluation
from penstock.train.learner import Learner, UpdateMetrics, UpdateResult
from penstock.train.metrics import ComputedUpdate, LearnerUpdate, ReadyStep, SamplingSpeed, ScoreWriter, Stopwatch, step_metrics
from penstock.train.monitoring import STALLED_STEPS, Alarm, idle_steps, new_alarms, why_idle
from penstock.train.resources import NO_FALLBACK, TrainingRun, TrainProgress

SMALL_SHARE = 0.5
"""Warn if less of an update than this reached the weights as they are served."""
log = logging.getLogger(__name__)


async def train_steps(
    run: TrainingRun, progress: TrainProgress, stop: asyncio.Event, background: BackgroundEvaluation
) -> TrainProgress:
    """Trains until `train.steps` are done or `stop` is set. On return, all trained steps are in a checkpoint."""
    section, history, alarmed = run.config.train, run.folder.metrics(), list[Alarm]()
    speed = await SamplingSpeed.begin(run.pool)
    async with ScoreWriter(run.folder.path) as scores:
        while progress.step < section.steps and not stop.is_set() and not alarmed:
            background.begin(progress.step)
            run.events.emit("step.start", step=progress.step + 1, version=progress.version)
            clock = Stopwatch()
            ready = await next_step(run, progress, clock, stop)
            if ready is None:
                break
            lease, version = ready.lease, progress.version
            metrics, progress = await update_policy(run, ready.update, progress)
            past = (*progress.past, progress.version)[-run.config.rollout.max_staleness - 1 :]
            progress = replace(progress, step=progress.step + 1, leases=(*progress.leases, lease.id), past=past)
            entry = step_metrics(run, ready, metrics, progress, version=version, train_s=clock.lap())
            entry |= {"tokens_per_s": await speed.lap(), **background.ended(), **progress.fallback._asdict()}
            progress = replace(progress, fallback=NO_FALLBACK)
            await scores.write(progress.step, ready.update.parts)
            history.append(entry)
            alarms = new_alarms(history, run.folder.evaluations().get("before-0"))
            entry["alarms"] = [alarm.name for alarm in alarms]
            run.folder.add_metrics(entry)
            if progress.step % checkpoint_interval(section, run.learners) == 0:
                progress = await save_checkpoint(run, progress)
            run.events.emit("train.step", **entry)
            for alarm in alarms:
                run.events.emit("train.alarm", **alarm._asdict())
            alarmed = alarms if section.on_alarm != "warn" else []
            idle = len(idle_steps(history))
            if idle and idle % STALLED_STEPS == 0:
                run.events.emit("train.stalled", steps=idle, text=f"step {progress.step}: {why_idle(history)}")
            run.rollouts.advance(progress.step)
    progress = await save_checkpoint(run, progress) if progress.leases else progress
    if alarmed:
        names = [alarm.name for alarm in alarmed]
        run.events.emit(
            "notice", text=f"stopped for {', '.join(names)} (train.on_alarm); the same command resumes it", alarms=names
        )
        stop.set()
    return progress


async def next_step(run: TrainingRun, progress: TrainProgress, clock: "Stopwatch", stop: asyncio.Event) -> ReadyStep | None:
    """Claims groups and computes their update; None if `claim` gave up. Groups at fault for a failing update are set aside."""
    rollout_s, crashed, failed_before = 0.0, list[str](), list[str]()
    while True:
        lease = await claim(run, progress, stop)
        if lease is None:
            return None
        groups = await with_branches(lease.groups, run, stop)
        if groups is None:
            await run.pool.release(lease.id)
            return None
        lease = replace(lease, groups=tuple(groups))
        rollout_s += clock.lap()
        run.events.emit("train.start", step=progress.step + 1, groups=len(lease.groups))
        try:
            return ReadyStep(lease, await compute_update(run, lease.groups), len(crashed), rollout_s)
        except Exception as error:
            if not (may_be_data(error) and are_finite(run)):
                raise
            culprits = await find_culprits(lease.groups, partial(try_credit, run), partial(compute_update, run))
            failed = [group.id for group in lease.groups]
            if not culprits and failed == failed_before:  # together twice, alone never
                raise TrainError(f"step {progress.step + 1} fails, though no group of it fails alone: {one_line(error)}") from error
            failed_before = failed
        await set_aside(run, lease, culprits, CRASHED)
        crashed += culprits.values()
        refuse_too_many(crashed, run.config.rollout.groups_per_step)
        run.rollouts.advance(progress.step)  # wake the scheduler, to replace them at once


async def with_branches(groups: Sequence[Group], run: TrainingRun, stop: asyncio.Event) -> list[Group] | None:
    """Returns the groups with continuations of their graded rollouts; None if `stop` was set first. A later process resumes."""
    limits = run.config.rollout
    if not limits.branches:
        return list(groups)
    points = [
        BranchPoint(rollout_id=attempt.ref.id, step=step)
        for group in groups
        for attempt in group.graded
        for step in spread_calls(attempt, limits.branch_calls)
    ]
    work, stopped = asyncio.ensure_future(run.rollouts.branch(points)), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return None
        made = [await run.pool.rollout(name) for name in work.result()]
    finally:
        stopped.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
    return [replace(group, branches=_of(group, made)) for group in groups]


def _of(group: Group, made: Sequence[Rollout]) -> tuple[Rollout, ...]:
    names = {attempt.ref.id for attempt in group.rollouts}
    return tuple(each for each in made if each.ref.branch is not None and each.ref.branch.rollout_id in names)


async def try_credit(run: TrainingRun, groups: Sequence[Group]) -> None:
    await asyncio.to_thread(credit_policies, groups, run)


def credit_policies(groups: Sequence[Group], run: TrainingRun) -> dict[str, CreditedSequences]:
    section = run.config.train
    return {
        policy: credit_groups(groups, section, run.advantage, learner, policy=policy, replay=run.replay)
        for policy, learner in run.learners.items()
    }


async def compute_update(run: TrainingRun, groups: Sequence[Group]) -> ComputedUpdate:
    """Computes the first update of every policy from these groups; the weights stay as they are."""
    parts = dict[str, LearnerUpdate]()
    async with run.rollouts.resting():
        for learner in run.learners.values():
            learner.zero()  # an update that was set aside may have left gradients
        credit = await asyncio.to_thread(credit_policies, groups, run)
        for policy, learner in run.learners.items():
            if credit[policy].sequences:
                batch = await asyncio.to_thread(pack_credited, learner, credit[policy])
                parts[policy] = LearnerUpdate(batch, await asyncio.to_thread(learner.compute, batch))
    return ComputedUpdate(credit, parts)


async def update_policy(
    run: TrainingRun, update: ComputedUpdate, progress: TrainProgress
) -> tuple[dict[str, UpdateMetrics], TrainProgress]:
    """Updates the weights and publishes them, of all policies at once under one number; does nothing without sequences."""
    if not update.parts:
        return {}, progress
    done = {policy: part.result for policy, part in update.parts.items()}
    version = max(progress.version, progress.last_version)
    for remaining in range(run.config.train.updates_per_step - 1, -1, -1):
        version += 1
        clock = Stopwatch()
        await run.publisher.publish(version, partial(apply_all, run, dict(done)))
        run.events.emit("policy.publish", version=version, seconds=round(clock.lap(), 3))
        if not remaining:
            break
        try:
            for policy, part in update.parts.items():
                done[policy] = await asyncio.to_thread(run.learners[policy].compute, part.batch, done[policy].proximal)
        except Exception as error:
            if not (may_be_data(error) and are_finite(run)):
                raise
            # The groups are in the weights already, so they count as trained. Only the remaining updates are skipped.
            run.events.emit("update.skip", step=progress.step + 1, updates=remaining, message=one_line(error))
            break
    if any(learner.decoder.device.type == "cpu" for learner in run.learners.values()):
        await asyncio.to_thread(trim_heap)  # of activations and gradients
    metrics = {policy: _final_metrics(run, policy, part.result.metrics, done[policy]) for policy, part in update.parts.items()}
    return metrics, replace(progress, version=version, last_version=version)


def pack_credited(learner: Learner, credit: CreditedSequences) -> Batch:
    return learner.pack(credit.sequences, rollouts=credit.counts["rollouts"], value_targets=credit.value_targets)


def apply_all(run: TrainingRun, updates: Mapping[str, UpdateResult]) -> None:
    for policy, learner in run.learners.items():
        learner.apply(updates.get(policy))


def are_finite(run: TrainingRun) -> bool:
    return all(learner.is_finite() for learner in run.learners.values())


def _final_metrics(run: TrainingRun, policy: str, first: UpdateMetrics, done: UpdateResult) -> UpdateMetrics:
    # Later updates move away from the sampling policy by design; only the first measures staleness and engine differences.
    share = run.learners[policy].served_share
    if share < SMALL_SHARE:
        log.warning(
            "%.0f %% of the update%s reached the served weights; raise %s or set engine.dtype = 'float32'",
            100 * share,
            f" of {policy}" if policy else "",
            f"policies.{policy}.lr" if policy else "train.lr",
        )
    return replace(done.metrics, kl_behaviour=first.kl_behaviour, logprob_gap=first.logprob_gap, served_share=share)


async def save_checkpoint(run: TrainingRun, progress: TrainProgress) -> TrainProgress:
    """Saves a checkpoint, then acknowledges its leases. In the other order, a kill in between would lose trained groups."""
    version = PolicyVersion(number=progress.version, step=progress.step, leases=progress.leases, past=progress.past)
    folder = await asyncio.to_thread(
        save,
        run.folder.checkpoints,
        version,
        run.learners,
        run.inputs.folder,
        run=run.folder.id,
        kept=run.config.train.checkpoints_kept,
    )
    for lease in progress.leases:
        await run.pool.ack(lease, progress.version)
    run.events.emit("checkpoint", version=version.number, step=version.step, folder=str(folder))
    return replace(progress, leases=())
