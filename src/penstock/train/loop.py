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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from penstock.config import RolloutSection
from penstock.errors import TrainError
from penstock.pool.base import Pool
from penstock.records import Attempt, Group, Lease, PolicyVersion, component_means
from penstock.records import Sequence as TrainingSequence
from penstock.rollout.author_tasks import one_line
from penstock.rollout.scheduler import TOO_FEW
from penstock.run.folder import COMPONENT
from penstock.run.shortfalls import ScoredEnd, shortfalls, shortfalls_json
from penstock.system.heap import trim_heap
from penstock.train.alarms import Alarm, new_alarms
from penstock.train.batches import Batch
from penstock.train.branched import branch_ends, with_branches
from penstock.train.credit import CreditedSequences, credit_groups, teaches_nothing
from penstock.train.held_out import BackgroundEvaluation, refuse_all_failed
from penstock.train.learner import UpdateMetrics, UpdateResult, total_metrics
from penstock.train.memory import peak_memory
from penstock.train.policy import ROLLED_BACK, Publication, checkpoint_interval, roll_back, save
from penstock.train.policy_groups import group_of
from penstock.train.promotion import promote_if_better
from penstock.train.scores import ScoreWriter
from penstock.train.sequences import behaviour_unknown_tokens, breaks, exactness
from penstock.train.set_aside import BEYOND, CRASHED, EQUAL, find_culprits, may_be_data, out_of_bounds, refuse_too_many, set_aside
from penstock.train.stalled import STALLED_STEPS, idle_steps, reply_examples, why_idle
from penstock.train.training_run import TrainingRun

RECHECK_S = 60.0
"""Seconds until a waiting trainer claims again without a change in the pool, as leases of others may have expired."""
SMALL_SHARE = 0.5
"""A warning says so if less of an update than this reached the weights as they are served."""
POLL_S = 1.0
"""How often a waiting trainer looks whether it is to stop."""
STOP_WAIT_S = 5.0
"""How long a run that is asked to stop waits for the rollouts of the running step; they are made again when it is resumed."""
TELL_S = 30.0
"""Seconds of waiting after which the reason is told."""
IDLE_S, RUNNING_S = 300.0, 1800.0
"""Training fails if the pool has not changed for so long: without any rollout, or longer than a rollout may take."""
MAX_EQUAL_ROUNDS = 10
"""Dynamic sampling replaces at most this many times `groups_per_step` groups for one step."""
MAX_SHORT_ROUNDS = 20
"""Training fails after this many times `groups_per_step` groups were dropped for too few completed rollouts."""

log = logging.getLogger(__name__)


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


class LostGroups(NamedTuple):
    """Counts groups that will never be trained."""

    short: int
    """Dropped because too few of their rollouts completed."""
    total: int


class LearnerUpdate(NamedTuple):
    """The first update of one policy in a step, computed but not applied."""

    batch: Batch
    result: UpdateResult


class ComputedUpdate(NamedTuple):
    """The first update of a step, computed but not applied, by policy."""

    credit: dict[str, CreditedSequences]
    parts: dict[str, LearnerUpdate]
    """Lacks policies without sequences."""


class ReadyStep(NamedTuple):
    """Groups that a step trains on, with their first update."""

    lease: Lease
    update: ComputedUpdate
    set_aside: int
    """Groups that were set aside on the way."""
    rollout_s: float
    """Spent on waiting for groups."""


async def train_steps(
    run: TrainingRun, progress: TrainProgress, stop: asyncio.Event, background: BackgroundEvaluation
) -> TrainProgress:
    """Trains until `train.steps` are done or `stop` is set. On return, all trained steps are in a checkpoint."""
    section, history, alarmed = run.config.train, run.folder.metrics(), list[Alarm]()
    speed = await SamplingSpeed.begin(run.pool)
    async with ScoreWriter(run.folder.path) as scores:
        while progress.step < section.steps and not stop.is_set() and not alarmed:
            if section.promote and background.is_due(progress.step):
                progress = await save_checkpoint(run, progress) if progress.leases else progress
                await background.between_steps(progress.step)
                await promote_if_better(run, f"during-{progress.step}", progress.version)
            else:
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
        await stop_for_alarm(run, alarmed, to_earlier=section.on_alarm == "rollback")
        stop.set()
    return progress


async def stop_for_alarm(run: TrainingRun, alarms: list[Alarm], *, to_earlier: bool) -> None:
    """Tell why the run stops. To roll back, set the checkpoints since the signs aside: the next process goes on before them."""
    kinds, since = ", ".join(alarm.name for alarm in alarms), min(alarm.since for alarm in alarms)
    text = f"stopped for {kinds} (train.on_alarm); the same command goes on"
    if to_earlier:
        kept, gone = await asyncio.to_thread(roll_back, run.folder.checkpoints, since)
        if kept is None:
            text += f", from here: no checkpoint of step {since} or before is left; keep more of them (train.checkpoints_kept)"
        else:
            text += f" from step {kept.step}, version {kept.number}; {len(gone)} later checkpoints are kept as *{ROLLED_BACK}"
    run.events.emit("notice", text=text, alarms=[alarm.name for alarm in alarms])


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
            refuse_all_failed([attempt for group in lease.groups for attempt in group.attempts], "of this step")
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
                f"{what}, and nothing has happened for {silent_s:.0f} s; the same command goes on, "
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


async def try_credit(run: TrainingRun, groups: Sequence[Group]) -> None:
    await asyncio.to_thread(credit_groups, groups, run)


async def compute_update(run: TrainingRun, groups: Sequence[Group]) -> ComputedUpdate:
    """Computes the first update of every policy from these groups; the weights stay as they are."""
    parts = dict[str, LearnerUpdate]()
    async with run.rollouts.resting():
        for learner in run.learners.values():
            learner.zero()  # an update that was set aside may have left gradients
        credit = await asyncio.to_thread(credit_groups, groups, run)
        for policy, learner in run.learners.items():
            if made := credit[policy].sequences:
                batch = await asyncio.to_thread(learner.pack, made, rollouts=credit[policy].counts["rollouts"])
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
        await run.publisher.publish(version, partial(apply_all, run))
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


def apply_all(run: TrainingRun) -> None:
    for learner in run.learners.values():
        learner.apply()


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


def step_metrics(
    run: TrainingRun,
    ready: ReadyStep,
    metrics: dict[str, UpdateMetrics],
    progress: TrainProgress,
    *,
    version: int,
    train_s: float,
) -> dict[str, Any]:
    """Returns a line of `metrics.jsonl`, but for the speed of sampling.

    `version` was served before the update: how stale tokens are is told against it.
    """
    lease, credit = ready.lease, ready.update.credit
    attempts = [attempt for group in lease.groups for attempt in group.attempts]
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    exact = exactness(*attempts)
    total = total_credit(credit, lease.groups)
    return {
        "step": progress.step,
        "steps": run.config.train.steps,
        "version": progress.version,
        "reward": sum(rewards) / len(rewards),
        "rewards": rewards,
        **{f"{COMPONENT}{name}": mean for name, mean in component_means(attempts).items()},
        "groups": len(lease.groups),
        "group_ids": [group.id for group in lease.groups],
        "groups_equal": total.counts["groups_equal"],
        "groups_stale": lease.stale,
        "rollouts": len(attempts),
        "ends": dict(Counter(str(attempt.end) for attempt in attempts)),
        "shortfalls": shortfalls_json(shortfalls(map(_scored_end, attempts), run.config.eval.passes)),
        "masked": _masked(total),
        "breaks": dict(breaks(*attempts)),
        **branch_ends(lease.groups),
        "inexact": dict(exact.inexact),
        "exact_tokens": exact.exact_tokens,
        "sampled_tokens": exact.sampled_tokens,
        "unhashed_tokens": exact.unhashed_tokens,
        "behaviour_unknown_tokens": behaviour_unknown_tokens(*attempts),
        "recomputed_tokens": total.counts["recomputed_tokens"],
        "exact_token_rate": exact.rate,
        **asdict(total_metrics(list(metrics.values()))),
        "rollout_s": round(ready.rollout_s, 3),
        "train_s": round(train_s, 3),
        "peak_memory_mb": max((round(peak_memory(each.decoder.device) / 1e6, 1) for each in run.learners.values()), default=None),
        "groups_set_aside": ready.set_aside,
        "code_changes": max(0, len(run.folder.code_versions()) - 1),
        **reply_examples(attempts),
        **staleness(total.sequences, version),
        **_publication(run),
        **({"policies": policy_metrics(run, ready, metrics, version=version)} if run.config.policies else {}),
    }


def _scored_end(attempt: Attempt) -> ScoredEnd:
    return ScoredEnd(str(attempt.end), attempt.message, attempt.reward)


def _publication(run: TrainingRun) -> dict[str, Any]:
    """Returns how the last version reached the servers; nothing where there are none."""
    last: Publication | None = getattr(run.publisher, "last", None)
    return {"publish_way": last.way, "publish_s": round(last.seconds, 3), "publish_bytes": last.bytes} if last else {}


def policy_metrics(
    run: TrainingRun, ready: ReadyStep, metrics: dict[str, UpdateMetrics], *, version: int
) -> dict[str, dict[str, Any]]:
    """Returns the part of a step's metrics that each policy has of its own."""
    made = dict[str, dict[str, Any]]()
    for policy, section in run.config.policies.items():
        views = [group_of(group, policy) for group in ready.lease.groups]
        attempts = [attempt for view in views for attempt in view.attempts]
        rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
        made[policy] = {
            "frozen": section.frozen,
            "rollouts": len(attempts),
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "calls": sum(len(attempt.steps) for attempt in attempts),
            "sampled_tokens": sum(step.sampled for attempt in attempts for step in attempt.steps),
        }
        if policy in run.learners:
            credit = ready.update.credit[policy]
            made[policy] |= {
                "updates": run.learners[policy].updates,
                "groups_equal": credit.counts["groups_equal"],
                "masked": _masked(credit),
                **asdict(metrics.get(policy, UpdateMetrics(lr=run.learners[policy].section.lr))),
                **staleness(credit.sequences, version),
            }
    return made


def total_credit(credit: dict[str, CreditedSequences], groups: Sequence[Group]) -> CreditedSequences:
    """Adds up what all policies were credited with. A group that taught none of them counts as one of equal reward."""
    if len(credit) == 1:
        return next(iter(credit.values()))
    made = [sequence for each in credit.values() for sequence in each.sequences]
    counts, taught = Counter[str](), {sequence.group_id for sequence in made}
    for each in credit.values():
        counts.update(each.counts)
    counts["groups_equal"] = sum(bool(group.graded) and group.id not in taught for group in groups)
    return CreditedSequences(made, counts)


def _masked(credit: CreditedSequences) -> dict[str, int]:
    return {key.removeprefix("masked."): n for key, n in credit.counts.items() if key.startswith("masked.")}


def staleness(made: Sequence[TrainingSequence], version: int) -> dict[str, float | int]:
    """Returns the mean and maximum of how many versions trained tokens are behind `version`."""
    found = Counter[int]()
    for sequence in made:
        found.update(version - each for each, trained in zip(sequence.versions, sequence.trained, strict=True) if trained)
    total = sum(age * count for age, count in found.items())
    return {"staleness": total / found.total() if found else 0.0, "staleness_max": max(found, default=0)}


class SamplingSpeed:
    """How many tokens are sampled in a second. In an asynchronous run a step's own tokens were sampled during earlier steps, so it
    counts what the pool got since the last step, over the whole time since then.
    """

    def __init__(self, pool: Pool, tokens: int) -> None:
        self._pool, self._tokens, self._clock = pool, tokens, Stopwatch()

    @classmethod
    async def begin(cls, pool: Pool) -> "SamplingSpeed":
        return cls(pool, (await pool.stats("train")).tokens)

    async def lap(self) -> float:
        """Returns the speed since the last lap, in tokens per second."""
        before, self._tokens = self._tokens, (await self._pool.stats("train")).tokens
        return round((self._tokens - before) / max(self._clock.lap(), 1e-9), 1)


class Stopwatch:
    def __init__(self) -> None:
        self._last = asyncio.get_running_loop().time()

    def lap(self) -> float:
        """Returns the seconds since the last lap, or since construction."""
        before, self._last = self._last, asyncio.get_running_loop().time()
        return self._last - before
