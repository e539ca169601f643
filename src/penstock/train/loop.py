"""The training algorithm: claim, credit, pack, update, publish, save.

    lease      = pool.claim(groups whose rollouts have all ended)      a lease: nobody else trains them meanwhile
    sequences  = credit_groups(lease.groups)                           advantages, then the paths of each token graph
    update     = learner.compute(pack(sequences))                      gradients; shared prefixes are forwarded once
    publisher.publish(version + 1, learner.apply)                      between two tokens the engine serves the new policy
    save_checkpoint(), pool.ack(lease)                                 from here on these groups are trained, for good

Rollouts are made meanwhile by the scheduler, no further ahead than `rollout.max_staleness` allows. A kill anywhere leaves the last
checkpoint and leases that were never acknowledged: the next process releases those and trains their groups again, from there.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.config import RolloutSection
from penstock.errors import TrainError
from penstock.records import Group, Lease, PolicyVersion
from penstock.records import Sequence as TrainingSequence
from penstock.rollout.scheduler import TOO_FEW
from penstock.train import policy
from penstock.train.advantages import DIVISORS
from penstock.train.batches import pack
from penstock.train.held_out import BackgroundEvaluation, refuse_all_failed
from penstock.train.learner import UpdateMetrics
from penstock.train.sequences import breaks, exactness, sequences
from penstock.train.training_run import TrainingRun

RECHECK_S = 60.0
"""How often a waiting trainer claims again although the pool has not changed: leases of others may have expired."""
MAX_SHORT_ROUNDS = 20
"""How many times the groups of a step may be dropped for too few completed rollouts before training is given up."""


@dataclass(frozen=True, slots=True)
class TrainProgress:
    step: int = 0
    version: int = 0
    last_version: int = 0
    """The highest version ever served, also by weights that a kill undid: a number is not used twice."""
    leases: tuple[str, ...] = ()
    """Trained, but not yet in a checkpoint."""
    past: tuple[int, ...] = (0,)
    """The versions after the last steps, `version` last: as many as a group may be behind, and one more."""


class LostGroups(NamedTuple):
    """Counts of groups that will never be trained."""

    short: int
    """Dropped because too few of their rollouts completed."""
    total: int


class CreditedSequences(NamedTuple):
    """The sequences of a lease's groups; `counts` as in `SequencesResult`."""

    sequences: list[TrainingSequence]
    counts: Counter[str]


async def train_steps(
    run: TrainingRun, progress: TrainProgress, stop: asyncio.Event, background: BackgroundEvaluation
) -> TrainProgress:
    """Train until `train.steps` are done or `stop` is set; what is trained is in a checkpoint when this returns."""
    section = run.config.train
    while progress.step < section.steps and not stop.is_set():
        background.begin(progress.step)
        run.events.emit("step.start", step=progress.step + 1, version=progress.version)
        clock = Stopwatch()
        lease = await claim(run, progress)
        rollout_s = clock.lap()
        run.events.emit("train.start", step=progress.step + 1, groups=len(lease.groups))
        credit = credit_groups(lease.groups, run)
        behind = staleness(credit.sequences, progress.version)
        metrics, progress = await update_policy(run, credit, progress)
        past = (*progress.past, progress.version)[-run.config.rollout.max_staleness - 1 :]
        progress = replace(progress, step=progress.step + 1, leases=(*progress.leases, lease.id), past=past)
        entry = step_metrics(run, lease, credit, metrics, progress, rollout_s=rollout_s, train_s=clock.lap())
        entry |= {**behind, **background.ended()}
        run.folder.add_metrics(entry)
        if progress.step % section.checkpoint_every == 0:
            progress = await save_checkpoint(run, progress)
        run.events.emit("train.step", **entry)
        run.rollouts.advance(progress.step)
    return await save_checkpoint(run, progress) if progress.leases else progress


async def claim(run: TrainingRun, progress: TrainProgress) -> Lease:
    """Wait until a step's groups are complete, and lease them; TrainError where group after group is dropped instead."""
    before = lost = await lost_groups(run)
    while True:
        position = await run.pool.position()
        lease = await run.pool.claim(
            run.config.rollout.groups_per_step,
            version=progress.version,
            max_staleness=max_versions_behind(run, progress),
            lease_s=run.config.pool.lease_s,
        )
        if lease is not None:
            refuse_all_failed([attempt for group in lease.groups for attempt in group.attempts], "of this step")
            return lease
        lost, known = await lost_groups(run), lost
        refuse_short_groups(lost.short - before.short, run.config.rollout)
        if lost != known:
            run.rollouts.advance(progress.step)  # so that the scheduler makes up for the dropped groups at once
        await run.pool.wait(position, timeout_s=RECHECK_S)


def refuse_short_groups(dropped: int, limits: RolloutSection) -> None:
    """Raises TrainError if no group has enough completed rollouts: the scheduler would make new ones for ever."""
    if dropped >= MAX_SHORT_ROUNDS * limits.groups_per_step:
        raise TrainError(
            f"{dropped} groups were dropped since the last step, each with fewer than rollout.min_size = {limits.min_size} "
            f"completed rollouts of {limits.group_size}; raise rollout.top_up, lower rollout.min_size, or see why they fail"
        )


def max_versions_behind(run: TrainingRun, progress: TrainProgress) -> int:
    """Returns how many versions a token may be behind: `max_staleness` steps, also where a kill left a gap in the numbers."""
    plain = run.config.rollout.max_staleness * run.config.train.updates_per_step  # a step makes as many versions
    return max(plain, progress.version - progress.past[0])


async def lost_groups(run: TrainingRun) -> LostGroups:
    """Returns how many groups were dropped so far."""
    stats = await run.pool.stats("train")
    return LostGroups(stats.drops.get(TOO_FEW, 0), stats.groups_stale + stats.groups_dropped)


def credit_groups(groups: Sequence[Group], run: TrainingRun) -> CreditedSequences:
    """Compute advantages within each group, then the sequences that carry them."""
    made, counts = list[TrainingSequence](), Counter[str]()
    divisor = DIVISORS.get(run.config.train.advantage)
    for group in groups:
        result = sequences(group, run.advantage(group), divisor=divisor)
        made += result.sequences
        counts.update(result.counts)
    return CreditedSequences(made, counts)


async def update_policy(
    run: TrainingRun, credit: CreditedSequences, progress: TrainProgress
) -> tuple[UpdateMetrics, TrainProgress]:
    """Update the weights and publish them; without a sequence to learn from, nothing changes."""
    if not credit.sequences:
        return UpdateMetrics(), progress
    section = run.config.train
    batch = pack(
        credit.sequences,
        rollouts=credit.counts["rollouts"],
        tokens_per_pass=section.tokens_per_pass,
        shared_prefix=section.shared_prefix,
    )
    done = await asyncio.to_thread(run.learner.compute, batch)
    first = done.metrics
    version = max(progress.version, progress.last_version)
    for remaining in range(section.updates_per_step - 1, -1, -1):
        version += 1
        await run.publisher.publish(version, run.learner.apply)
        if remaining:
            done = await asyncio.to_thread(run.learner.compute, batch, done.proximal)
    metrics = replace(done.metrics, kl_behaviour=first.kl_behaviour, logprob_gap=first.logprob_gap)
    return metrics, replace(progress, version=version, last_version=version)


async def save_checkpoint(run: TrainingRun, progress: TrainProgress) -> TrainProgress:
    """Save a checkpoint; once it is on disk, its leases are acknowledged."""
    version = PolicyVersion(number=progress.version, step=progress.step, leases=progress.leases)
    folder = await asyncio.to_thread(
        policy.save, run.folder.checkpoints, version, run.learner, run.inputs.folder, kept=run.config.train.checkpoints_kept
    )
    for lease in progress.leases:
        await run.pool.ack(lease, progress.version)
    run.events.emit("checkpoint", version=version.number, step=version.step, folder=str(folder))
    return replace(progress, leases=())


def step_metrics(
    run: TrainingRun,
    lease: Lease,
    credit: CreditedSequences,
    metrics: UpdateMetrics,
    progress: TrainProgress,
    *,
    rollout_s: float,
    train_s: float,
) -> dict[str, Any]:
    """Returns a line of `metrics.jsonl`. Tokens per second: sampled tokens over the step's whole time."""
    attempts = [attempt for group in lease.groups for attempt in group.attempts]
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    exact = exactness(*attempts)
    return {
        "step": progress.step,
        "steps": run.config.train.steps,
        "version": progress.version,
        "reward": sum(rewards) / len(rewards),
        "rewards": rewards,
        "groups": len(lease.groups),
        "group_ids": [group.id for group in lease.groups],
        "groups_equal": credit.counts["groups_equal"],
        "groups_stale": lease.stale,
        "rollouts": len(attempts),
        "ends": dict(Counter(str(attempt.end) for attempt in attempts)),
        "masked": {key.removeprefix("masked."): n for key, n in credit.counts.items() if key.startswith("masked.")},
        "breaks": dict(breaks(*attempts)),
        "inexact": dict(exact.inexact),
        "exact_tokens": exact.exact_tokens,
        "sampled_tokens": exact.sampled_tokens,
        "unhashed_tokens": exact.unhashed_tokens,
        "exact_token_rate": exact.rate,
        **{name: getattr(metrics, name) for name in UpdateMetrics.__slots__},
        "rollout_s": round(rollout_s, 3),
        "train_s": round(train_s, 3),
        "tokens_per_s": round(exact.sampled_tokens / (rollout_s + train_s), 1),
    }


def staleness(made: Sequence[TrainingSequence], version: int) -> dict[str, float | int]:
    """Returns by how many versions the trained tokens' policy is behind the current one: the mean and the maximum."""
    found = Counter[int]()
    for sequence in made:
        found.update(version - each for each, trained in zip(sequence.versions, sequence.trained, strict=True) if trained)
    total = sum(age * count for age, count in found.items())
    return {"staleness": total / found.total() if found else 0.0, "staleness_max": max(found, default=0)}


class Stopwatch:
    def __init__(self) -> None:
        self._last = asyncio.get_running_loop().time()

    def lap(self) -> float:
        """Returns the seconds since the last lap, or since it was made."""
        before, self._last = self._last, asyncio.get_running_loop().time()
        return self._last - before
