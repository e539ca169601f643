"""The algorithm, as the trainer sees it: claim, credit, pack, update, publish, keep.

    lease      = pool.claim(groups whose rollouts have all ended)      a lease: nobody else trains them meanwhile
    sequences  = credit(lease.groups)                                  advantages, then the paths of each token graph
    update     = learner.compute(pack(sequences))                      gradients; shared prefixes are forwarded once
    publisher.publish(version + 1, learner.apply)                      between two tokens the engine serves the new policy
    save(checkpoint), pool.ack(lease)                                  from here on these groups are trained, for good

Rollouts are made meanwhile by the scheduler, no further ahead than `rollout.max_staleness` allows. A kill anywhere leaves the last
checkpoint and leases that were never acknowledged: the next run gives those back and trains their groups again, from there.
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
"""How often a waiting trainer looks for groups although nothing has changed: leases of others may have run out."""
MAX_SHORT_ROUNDS = 20
"""How many times the groups of a step may be dropped for too few completed rollouts before training is given up."""


@dataclass(frozen=True, slots=True)
class TrainProgress:
    step: int = 0
    version: int = 0
    last_version: int = 0
    """The highest number ever served, also by weights that a kill undid: numbers are not used twice."""
    leases: tuple[str, ...] = ()
    """Trained, but not yet in a checkpoint."""
    past: tuple[int, ...] = (0,)
    """The versions after the last steps, `version` last: as many as a group may be behind, and one more."""


class LostGroups(NamedTuple):
    """Groups that will never be trained."""

    short: int
    """Because too few of their rollouts completed."""
    total: int


class CreditedSequences(NamedTuple):
    """What a lease's groups give to train on."""

    sequences: list[TrainingSequence]
    counts: Counter[str]


async def train_steps(s: TrainingRun, progress: TrainProgress, stop: asyncio.Event, beside: BackgroundEvaluation) -> TrainProgress:
    """Train until `train.steps` are done or `stop` is set; what is trained is in a checkpoint when this returns."""
    section = s.config.train
    while progress.step < section.steps and not stop.is_set():
        beside.begin(progress.step)
        s.events.emit("step.start", step=progress.step + 1, version=progress.version)
        clock = Stopwatch()
        lease = await claim(s, progress)
        rollout_s = clock.lap()
        s.events.emit("train.start", step=progress.step + 1, groups=len(lease.groups))
        credit = credit_groups(lease.groups, s)
        old = staleness(credit.sequences, progress.version)
        metrics, progress = await update_policy(s, credit, progress)
        past = (*progress.past, progress.version)[-s.config.rollout.max_staleness - 1 :]
        progress = replace(progress, step=progress.step + 1, leases=(*progress.leases, lease.id), past=past)
        entry = step_metrics(s, lease, credit, metrics, progress, rollout_s=rollout_s, train_s=clock.lap())
        entry |= {**old, **beside.ended()}
        s.folder.add_metrics(entry)
        if progress.step % section.checkpoint_every == 0:
            progress = await save_checkpoint(s, progress)
        s.events.emit("train.step", **entry)
        s.rollouts.advance(progress.step)
    return await save_checkpoint(s, progress) if progress.leases else progress


async def claim(s: TrainingRun, progress: TrainProgress) -> Lease:
    """Wait until a step's groups are complete, and borrow them; TrainError where group after group is dropped instead."""
    before = lost = await lost_groups(s)
    while True:
        position = await s.pool.position()
        lease = await s.pool.claim(
            s.config.rollout.groups_per_step,
            version=progress.version,
            max_staleness=max_versions_behind(s, progress),
            lease_s=s.config.pool.lease_s,
        )
        if lease is not None:
            refuse_all_failed([attempt for group in lease.groups for attempt in group.attempts], "of this step")
            return lease
        lost, known = await lost_groups(s), lost
        refuse_short_groups(lost.short - before.short, s.config.rollout)
        if lost != known:
            s.rollouts.advance(progress.step)  # those are made up for at once
        await s.pool.wait(position, timeout_s=RECHECK_S)


def refuse_short_groups(dropped: int, limits: RolloutSection) -> None:
    """Training cannot go on where no group has enough completed rollouts: the scheduler would make new ones for ever."""
    if dropped >= MAX_SHORT_ROUNDS * limits.groups_per_step:
        raise TrainError(
            f"{dropped} groups were dropped since the last step, each with fewer than rollout.min_size = {limits.min_size} "
            f"completed rollouts of {limits.group_size}; raise rollout.top_up, lower rollout.min_size, or see why they fail"
        )


def max_versions_behind(s: TrainingRun, progress: TrainProgress) -> int:
    """How far a token's version may be behind, as a number: `max_staleness` steps, also where a kill left a gap in the numbers."""
    plain = s.config.rollout.max_staleness * s.config.train.updates_per_step  # a step makes as many versions
    return max(plain, progress.version - progress.past[0])


async def lost_groups(s: TrainingRun) -> LostGroups:
    """How many groups were dropped so far."""
    stats = await s.pool.stats("train")
    return LostGroups(stats.drops.get(TOO_FEW, 0), stats.groups_stale + stats.groups_dropped)


def credit_groups(groups: Sequence[Group], s: TrainingRun) -> CreditedSequences:
    """Advantages within each group, then the sequences that carry them."""
    made, counts = list[TrainingSequence](), Counter[str]()
    divisor = DIVISORS.get(s.config.train.advantage)
    for group in groups:
        result = sequences(group, s.advantage(group), divisor=divisor)
        made += result.sequences
        counts.update(result.counts)
    return CreditedSequences(made, counts)


async def update_policy(s: TrainingRun, credit: CreditedSequences, progress: TrainProgress) -> tuple[UpdateMetrics, TrainProgress]:
    """Improve the policy and let the engine serve it; where no group has anything to teach, nothing changes."""
    if not credit.sequences:
        return UpdateMetrics(), progress
    section = s.config.train
    batch = pack(
        credit.sequences,
        rollouts=credit.counts["rollouts"],
        tokens_per_pass=section.tokens_per_pass,
        shared_prefix=section.shared_prefix,
    )
    done = await asyncio.to_thread(s.learner.compute, batch)
    first = done.metrics
    version = max(progress.version, progress.last_version)
    for remaining in range(section.updates_per_step - 1, -1, -1):
        version += 1
        await s.publisher.publish(version, s.learner.apply)
        if remaining:
            done = await asyncio.to_thread(s.learner.compute, batch, done.proximal)
    metrics = replace(done.metrics, kl_behaviour=first.kl_behaviour, logprob_gap=first.logprob_gap)
    return metrics, replace(progress, version=version, last_version=version)


async def save_checkpoint(s: TrainingRun, progress: TrainProgress) -> TrainProgress:
    """Save a checkpoint; once it is on disk, the leases that led to it are acknowledged."""
    version = PolicyVersion(number=progress.version, step=progress.step, leases=progress.leases)
    folder = await asyncio.to_thread(
        policy.save, s.folder.checkpoints, version, s.learner, s.inputs.folder, kept=s.config.train.checkpoints_kept
    )
    for lease in progress.leases:
        await s.pool.ack(lease, progress.version)
    s.events.emit("checkpoint", version=version.number, step=version.step, folder=str(folder))
    return replace(progress, leases=())


def step_metrics(
    s: TrainingRun,
    lease: Lease,
    credit: CreditedSequences,
    metrics: UpdateMetrics,
    progress: TrainProgress,
    *,
    rollout_s: float,
    train_s: float,
) -> dict[str, Any]:
    """One step in numbers: a line of `metrics.jsonl`. Tokens per second are sampled ones over the step's whole time."""
    attempts = [attempt for group in lease.groups for attempt in group.attempts]
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    exact = exactness(*attempts)
    return {
        "step": progress.step,
        "steps": s.config.train.steps,
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
    """How many versions behind the policy that is trained the tokens were sampled: their mean, and the oldest one's."""
    found = Counter[int]()
    for sequence in made:
        found.update(version - each for each, trained in zip(sequence.versions, sequence.trained, strict=True) if trained)
    total = sum(age * count for age, count in found.items())
    return {"staleness": total / found.total() if found else 0.0, "staleness_max": max(found, default=0)}


class Stopwatch:
    """Seconds since the last look."""

    def __init__(self) -> None:
        self._last = asyncio.get_running_loop().time()

    def lap(self) -> float:
        """Seconds since it was made, or since the last lap."""
        before, self._last = self._last, asyncio.get_running_loop().time()
        return self._last - before
