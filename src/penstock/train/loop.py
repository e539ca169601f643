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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from penstock.config import RolloutSection
from penstock.errors import ConfigError, EngineError, PoolError, TrainError, one_line
from penstock.records import MAX_REWARD, BranchPoint, End, Group, Lease, PolicyVersion, Rollout
from penstock.rollout.branches import spread_calls
from penstock.rollout.scheduler import TOO_FEW
from penstock.system.processes import trim_heap
from penstock.train.batches import Batch
from penstock.train.checkpoints import checkpoint_interval, save
from penstock.train.credit import CreditedSequences, credit_groups, teaches_nothing
from penstock.train.evaluation import BackgroundEvaluation, refuse_all_failed
from penstock.train.learner import Learner, UpdateMetrics, UpdateResult, is_machine_error
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


RECHECK_S = 60.0
"""Seconds until a waiting trainer claims again without a change in the pool, as leases of others may have expired."""
POLL_S = 1.0
"""How often a waiting trainer looks whether it is to stop."""
STOP_WAIT_S = 5.0
"""How long a run that is asked to stop waits for the rollouts of the running step; they are made again when it is resumed."""
TELL_S = 30.0
"""Seconds of waiting after which the reason is reported."""
IDLE_S, RUNNING_S = 300.0, 1800.0
"""Training fails if the pool has not changed for so long: without any rollout, or longer than a rollout may take."""
MAX_EQUAL_ROUNDS = 10
"""Dynamic sampling replaces at most this many times `groups_per_step` groups for one step."""
MAX_SHORT_ROUNDS = 20
"""Training fails after this many times `groups_per_step` groups were dropped for too few completed rollouts."""
CRASHED = "crashed the trainer"
BEYOND = "a reward is out of bounds"
EQUAL = "all rewards are equal"
"""Reasons of dropped groups, as the pool counts them."""
MAX_ROUNDS = 3
"""Training fails after this many times `groups_per_step` groups crashed it since the last step: then it is not the groups."""

TryUpdate = Callable[[Sequence[Group]], Awaitable[object]]
"""Computes an update from these groups and drops it."""


class LostGroups(NamedTuple):
    """Counts groups that will never be trained."""

    short: int
    """Dropped because too few of their rollouts completed."""
    total: int


async def claim(run: TrainingRun, progress: TrainProgress, stop: asyncio.Event) -> Lease | None:
    """Waits until a step's groups are complete, and leases them; None if `stop` was set and they took too long.

    Raises TrainError if groups keep being dropped instead, or if nothing happens that could complete one.
    """
    before, replaced = await lost_groups(run), 0
    lost = before
    waiting = ClaimWait(run, progress.step + 1, stop)
    while True:
        position = await run.pool.position()  # before the claim, or a change in between would be missed
        lease = await run.pool.claim(
            run.config.rollout.groups_per_step,
            version=progress.version,
            max_staleness=max_versions_behind(run, progress),
            lease_s=run.config.pool.lease_s,
        )
        if lease is not None and (unusable := out_of_bounds(lease.groups)):
            await set_aside(run, lease, unusable, BEYOND)
            run.rollouts.advance(progress.step)
            continue
        if lease is not None and (equal := equal_groups(run, lease, replaced)):
            replaced += len(equal)
            await set_aside(run, lease, equal, EQUAL)
            run.rollouts.advance(progress.step)
            continue
        if lease is not None:
            refuse_all_failed([attempt for group in lease.groups for attempt in group.rollouts], "of this step")
            return lease
        lost, known = await lost_groups(run), lost
        refuse_short_groups(lost.short - before.short, run.config.rollout)
        if lost != known:
            run.rollouts.advance(progress.step)  # wake the scheduler, to replace dropped groups at once
        if not await waiting.until_change(position):
            return None


def equal_groups(run: TrainingRun, lease: Lease, replaced: int) -> dict[str, str]:
    """Returns a message for each group to replace by dynamic sampling. After many of them, a step takes what there is."""
    section, per_step = run.config.train, run.config.rollout.groups_per_step
    if not section.dynamic_sampling or replaced >= MAX_EQUAL_ROUNDS * per_step:
        return {}
    message = "all its rollouts earned the same"
    return {group.id: message for group in lease.groups if teaches_nothing(group, run.advantage)}


class ClaimWait:
    """Waits for changes in the pool: says what for, ends soon after `stop` is set, and fails if no change can come."""

    def __init__(self, run: TrainingRun, step: int, stop: asyncio.Event) -> None:
        self._run, self._step, self._stop = run, step, stop
        self._now = asyncio.get_running_loop().time
        self._started = self._changed = self._now()
        self._tell_at = self._started + TELL_S
        self._give_up_at: float | None = None

    async def until_change(self, position: int) -> bool:
        """Returns False if `stop` was set `STOP_WAIT_S` ago, True after a change, and after `RECHECK_S` without one."""
        recheck_at = self._now() + RECHECK_S
        while self._now() < recheck_at:
            if self._stop.is_set():
                self._give_up_at = self._give_up_at or self._now() + STOP_WAIT_S
                if self._now() >= self._give_up_at:
                    return False
            if self._now() >= self._tell_at:
                self._tell_at += RECHECK_S
                await self._tell()
            if await self._run.pool.wait(position, timeout_s=POLL_S):
                self._changed = self._now()
                break
        return True

    async def _tell(self) -> None:
        stats, limits = await self._run.pool.stats("train"), self._run.config.rollout
        running = stats.groups - stats.groups_complete + stats.groups_short
        over = stats.groups_short + stats.groups_leased + stats.groups_trained + stats.groups_stale + stats.groups_dropped
        complete, silent_s = stats.groups_complete - over, self._now() - self._changed
        needed = f"step {self._step} waits for {limits.groups_per_step} complete groups"
        what = f"{needed}: {complete} are, {running} have rollouts under way"
        patience_s = IDLE_S if not running else RUNNING_S + limits.agent_timeout_s + limits.grader_timeout_s
        if silent_s >= patience_s:
            raise TrainError(
                f"{what}, and nothing has happened for {silent_s:.0f} s; the same command resumes, "
                "`penstock pool verify` says whether the pool is damaged"
            )
        self._run.events.emit("train.wait", step=self._step, seconds=round(self._now() - self._started), text=what)


def refuse_short_groups(dropped: int, limits: RolloutSection) -> None:
    """Raises TrainError after too many drops, as the scheduler would otherwise replace groups for ever."""
    if dropped >= MAX_SHORT_ROUNDS * limits.groups_per_step:
        raise TrainError(
            f"{dropped} groups were dropped since the last step, each with fewer than rollout.min_size = {limits.min_size} "
            f"completed rollouts of {limits.group_size}; raise rollout.top_up, lower rollout.min_size, or see why they fail"
        )


def max_versions_behind(run: TrainingRun, progress: TrainProgress) -> int:
    """Returns how many versions a token may be behind: those of `max_staleness` steps, with any gap that a kill left."""
    plain = run.config.rollout.max_staleness * run.config.train.updates_per_step  # each update makes a version
    return max(plain, progress.version - progress.past[0])


async def lost_groups(run: TrainingRun) -> LostGroups:
    stats = await run.pool.stats("train")
    return LostGroups(stats.drops.get(TOO_FEW, 0), stats.groups_stale + stats.groups_dropped)


def may_be_data(error: Exception) -> bool:
    """Returns whether a group can be the reason of `error`, not the machine, the pool or the engine."""
    return not (isinstance(error, PoolError | EngineError | ConfigError) or is_machine_error(error))


def out_of_bounds(groups: Sequence[Group]) -> dict[str, str]:
    """Returns a message for each group with a reward that no grader may give; an earlier penstock stored it."""
    return {
        group.id: f"rollout {attempt.ref.id} has reward {attempt.grades_total:g}, beyond {MAX_REWARD:g}"
        for group in groups
        for attempt in group.rollouts
        if attempt.end is End.COMPLETED and not attempt.void and abs(attempt.grades_total or 0.0) > MAX_REWARD
    }


async def find_culprits(groups: Sequence[Group], *attempts: TryUpdate) -> dict[str, str]:
    """Returns a message for each group that fails alone in the first of `attempts` in which any does."""
    for attempt in attempts:
        if found := {group.id: message for group in groups if (message := await _failure(group, attempt))}:
            return found
    return {}


async def set_aside(run: TrainingRun, lease: Lease, messages: Mapping[str, str], reason: str) -> None:
    """Returns a lease, and takes these groups of it out of training. A kill in between leaves them as they were."""
    await run.pool.release(lease.id)
    for group_id, message in messages.items():
        run.events.emit("group.drop", group_id=group_id, reason=reason, message=message)
        await run.pool.drop(group_id, reason)


def refuse_too_many(messages: Sequence[str], groups_per_step: int) -> None:
    """Raises TrainError if no group seems to pass, as all would be set aside otherwise."""
    if len(messages) >= MAX_ROUNDS * groups_per_step:
        raise TrainError(
            f"{len(messages)} groups crashed the trainer since the last step and were set aside, the last with: {messages[-1]}; "
            "look at train.advantage, train.loss and the grader"
        )


async def _failure(group: Group, attempt: TryUpdate) -> str:
    try:
        await attempt([group])
    except Exception as error:
        if not may_be_data(error):
            raise
        return one_line(error)
    return ""
