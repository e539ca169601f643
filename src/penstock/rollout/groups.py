"""The group of rollouts that runs: its deadline, and what becomes of it if too many of its attempts fail."""

import asyncio
from dataclasses import dataclass, field

from penstock.config import RolloutSection
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.records import End, Group, Rollout, Task

TOPPED_UP = "too few of its group completed"
TOO_FEW = "too few rollouts completed"


@dataclass(slots=True, eq=False)
class LiveGroup:
    """What the scheduler knows of a group whose places have not all ended."""

    id: str
    task: Task
    ends: dict[int, End | None]
    """By place, of the attempt that counts; None while it runs."""
    rollouts: dict[int, Rollout]
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])
    """Of the attempts that run, by rollout."""
    topped_up: int = 0
    late: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Whether every place has ended."""
        return all(end is not None for end in self.ends.values())

    def short_of(self, min_size: int) -> list[Rollout]:
        """The attempts that failed, where too few completed; else none."""
        failed = [self.rollouts[place] for place, end in self.ends.items() if end is not End.COMPLETED]
        return failed if len(self.ends) - len(failed) < min_size else []


def live_group(task: Task, rollouts: list[Rollout]) -> LiveGroup:
    """A group that was opened just now."""
    places = {rollout.place: rollout for rollout in rollouts}
    return LiveGroup(rollouts[0].group_id, task, dict.fromkeys(places), places)


def left_behind(group: Group) -> LiveGroup:
    """A group that an earlier process left."""
    places = {attempt.rollout.place: attempt.rollout for attempt in group.attempts}
    ends = {attempt.rollout.place: attempt.end for attempt in group.attempts}
    return LiveGroup(group.id, group.task, ends, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """What `[rollout]` says about groups."""

    pool: Pool
    events: Events
    limits: RolloutSection

    async def make_up(self, group: LiveGroup) -> list[Rollout]:
        """New attempts for a group that ended short; none where it is complete or was dropped."""
        failed = group.short_of(self.limits.min_size)
        if not failed:
            return []
        if group.late or group.topped_up >= self.limits.top_up:
            await self.pool.drop(group.id, TOO_FEW)
            self.events.emit("group.drop", group_id=group.id, reason=TOO_FEW, failed=len(failed))
            return []
        group.topped_up += 1
        fresh = [await self.pool.replace(rollout, TOPPED_UP) for rollout in failed]
        self.events.emit("group.top_up", group_id=group.id, rollouts=len(fresh), attempt=group.topped_up)
        for rollout in fresh:
            group.rollouts[rollout.place], group.ends[rollout.place] = rollout, None
        return fresh

    async def expire(self, group: LiveGroup) -> None:
        """End what still runs of a group whose time is up, so that what completed can be trained."""
        group.late = True
        message = f"its group took longer than rollout.group_timeout_s = {self.limits.group_timeout_s:g}; raise it or do less"
        for place, end in group.ends.items():
            if end is None:
                await self.pool.end(group.rollouts[place].id, End.TIMEOUT, message)
        for task in list(group.tasks.values()):
            task.cancel()
