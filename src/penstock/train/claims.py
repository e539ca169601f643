"""The groups of a step: claimed once they are complete, replaced by others where they cannot be trained.

A group that makes an update fail is tried once more, alone. If it fails again, it is at fault and quarantined: taken out of
training for good, counted and reported. If all pass alone, none is at fault.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.config import RolloutSection
from penstock.errors import ConfigError, EngineError, PoolError, TrainError, one_line
from penstock.records import MAX_REWARD, End, Group, Lease
from penstock.rollout.scheduler import TOO_FEW
from penstock.train.credit import teaches_nothing
from penstock.train.evaluation import refuse_all_failed
from penstock.train.learner import is_machine_error
from penstock.train.resources import TrainingRun, TrainProgress

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
