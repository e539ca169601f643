"""Reading a pool from end to end: groups a few at a time, with every attempt that was ever made at them."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from penstock.pool.base import Pool
from penstock.records import Attempt, Group

PAGE = 8
"""Groups in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A group with all that is known of it: what one pool hands to another."""

    group: Group
    attempts: tuple[Attempt, ...]
    """All, by place and attempt, those that were replaced included."""
    trained: int | None = None
    """The policy version that it was trained into; None where it was not."""


async def every_group(pool: Pool, channel: str, *, first_seq: int = 0) -> AsyncIterator[Group]:
    """The groups of a channel in order; those that come to be meanwhile are left out."""
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


async def every_whole(pool: Pool, channels: Iterable[str]) -> AsyncIterator[Whole]:
    """All groups of these channels with their replaced attempts and what became of them."""
    trained = dict(await pool.trained())
    for channel in channels:
        async for group in every_group(pool, channel):
            yield Whole(group=group, attempts=await all_attempts(pool, group), trained=trained.get(group.id))


async def all_attempts(pool: Pool, group: Group) -> tuple[Attempt, ...]:
    """Of a group, those that were replaced included."""
    current = {attempt.rollout.id: attempt for attempt in group.attempts}
    rollouts = await pool.rollouts(group.id)
    return tuple([current.get(rollout.id) or await pool.attempt(rollout.id) for rollout in rollouts])
