"""Reads a pool from end to end: a few groups at a time, with every attempt that was made at them."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from penstock.pool.base import Pool
from penstock.records import Attempt, Group

PAGE = 8
"""Groups in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """A group with everything that is known of it; the unit of export and import."""

    group: Group
    attempts: tuple[Attempt, ...]
    """By place and attempt, replaced ones included."""
    trained: int | None = None
    """The policy version that it was trained into; None if it was not."""


async def iterate_groups(pool: Pool, channel: str, *, first_seq: int = 0) -> AsyncIterator[Group]:
    """Yield the groups of a channel in order, without those that are opened meanwhile."""
    last = (await pool.stats(channel)).last_seq
    seq, seen = first_seq, set[str]()
    while page := await pool.groups(channel, first_seq=seq, limit=PAGE + len(seen)):
        new = [group for group in page if group.id not in seen and group.seq <= last]
        for group in new:
            yield group
        if not new:
            return
        seq = new[-1].seq
        seen = {group.id for group in page if group.seq == seq}  # several groups may share a number


async def iterate_histories(pool: Pool, channels: Iterable[str]) -> AsyncIterator[GroupHistory]:
    """Yield all groups of these channels, with replaced attempts and the versions that they were trained into."""
    trained = dict(await pool.trained())
    for channel in channels:
        async for group in iterate_groups(pool, channel):
            yield GroupHistory(group=group, attempts=await all_attempts(pool, group), trained=trained.get(group.id))


async def all_attempts(pool: Pool, group: Group) -> tuple[Attempt, ...]:
    current = {attempt.rollout.id: attempt for attempt in group.attempts}
    rollouts = await pool.rollouts(group.id)
    return tuple([current.get(rollout.id) or await pool.attempt(rollout.id) for rollout in rollouts])
