"""Groups with all their rollouts: read from a pool page by page, exported to files and imported from them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.errors import ConfigError, PoolConflict, PoolError
from penstock.pool.base import Pool
from penstock.pool.export import EXPORTS, IMPORTS
from penstock.records import Group, Rollout, Task

PAGE = 8
"""Groups in memory at once."""
HOLD_S = 3600.0
"""Lease time of groups that are held back while later ones are marked as trained."""
ANY_AGE = 2**40
"""A staleness that no group exceeds."""

TransferProgress = Callable[[int], None]
"""Called with the number of groups done so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """A group with everything that is known of it; the unit of export and import."""

    group: Group
    rollouts: tuple[Rollout, ...]
    """By place and attempt number, replaced ones included."""
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
    """Yield all groups of these channels, with replaced rollouts and the versions that they were trained into."""
    trained = dict(await pool.trained())
    for channel in channels:
        async for group in iterate_groups(pool, channel):
            yield GroupHistory(group=group, rollouts=await all_rollouts(pool, group), trained=trained.get(group.id))


async def all_rollouts(pool: Pool, group: Group) -> tuple[Rollout, ...]:
    current = {rollout.ref.id: rollout for rollout in group.rollouts}
    return tuple([current.get(ref.id) or await pool.rollout(ref.id) for ref in await pool.rollout_refs(group.id)])


# Export and import


class Sink(Protocol):
    """Takes groups one by one. Its output appears, complete, when its context is left."""

    def write(self, history: GroupHistory) -> None: ...


OpenExport = Callable[[Path, Sequence[str]], AbstractContextManager[Sink]]
ReadExport = Callable[[Path], Iterable[GroupHistory]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    groups: int = 0
    rollouts: int = 0
    steps: int = 0
    known: int = 0
    """Rollouts that were stored already, with the same content."""

    def with_group(self, history: GroupHistory, known: int = 0) -> "TransferCounts":
        steps = sum(len(rollout.steps) for rollout in history.rollouts)
        return TransferCounts(
            groups=self.groups + 1,
            rollouts=self.rollouts + len(history.rollouts),
            steps=self.steps + steps,
            known=self.known + known,
        )


async def export_pool(pool: Pool, out: Path, *, name: str, channels: Sequence[str], progress: TransferProgress) -> TransferCounts:
    """Write these channels to `out` in the format `name`. It appears when it is complete; an existing one is refused."""
    open_export: OpenExport = EXPORTS.load(name)
    counts = TransferCounts()
    with open_export(out, channels) as sink:
        async for history in iterate_histories(pool, channels):
            await asyncio.to_thread(sink.write, history)
            counts = counts.with_group(history)
            progress(counts.groups)
    return counts


def read_export(path: Path) -> Iterable[GroupHistory]:
    """Read the groups of an exported file or folder; ConfigError if it cannot be read back."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder; give what `penstock pool export` wrote")
    name = "jsonl" if path.is_file() else "parquet"
    if name == "parquet" and not (path / "groups.parquet").exists():
        raise ConfigError(
            f"{path}: not an export that can be read back; give a .jsonl file or a folder of parquet files "
            "(ATIF leaves out what a pool needs, so it is for other tools only)"
        )
    read: ReadExport = IMPORTS.load(name)
    return read(path)


async def import_pool(path: Path, pool: Pool, *, progress: TransferProgress) -> TransferCounts:
    """Store all groups of an export in `pool`. Repeating it, also after a kill, adds what is missing."""
    counts, trained, held = TransferCounts(), dict(await pool.trained()), list[str]()
    groups = iter(read_export(path))
    try:
        while history := await asyncio.to_thread(next, groups, None):
            known = await _add_group(pool, history)
            if history.trained is not None and trained.get(history.group.id) != history.trained:
                held += await _mark_trained(pool, history, history.trained)
            counts = counts.with_group(history, known)
            progress(counts.groups)
    finally:
        for lease_id in held:
            await pool.release(lease_id)
    return counts


async def _add_group(pool: Pool, history: GroupHistory) -> int:
    """Store one group, its places concurrently so that they share commits. Returns how many rollouts were stored before."""
    group, places = history.group, dict[int, list[Rollout]]()
    for rollout in history.rollouts:
        places.setdefault(rollout.ref.place, []).append(rollout)
    await pool.open_group(group.task, [places[place][0].ref for place in sorted(places)], seq=group.seq)
    try:
        async with asyncio.TaskGroup() as tasks:
            added = [tasks.create_task(_add_place(pool, group.task, rollouts)) for rollouts in places.values()]
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    return sum(task.result() for task in added)


async def _add_place(pool: Pool, task: Task, rollouts: list[Rollout]) -> int:
    """Store the rollouts at one place; each replaces the one before."""
    known, before = 0, None
    for rollout in rollouts:
        if before is not None:
            await pool.replace(before.ref, before.message)
        if await pool.task(rollout.ref.id) != task:
            group_id = rollout.ref.group_id
            raise PoolConflict(f"group {group_id!r} is in this pool with another task; import into another folder")
        known += await _add_rollout(pool, rollout)
        before = rollout
    return known


async def _add_rollout(pool: Pool, rollout: Rollout) -> bool:
    """Store what is missing of a rollout. Returns whether all of it was stored before."""
    name = rollout.ref.id
    existing = await pool.rollout(name)
    if existing == rollout:
        return existing.end is not None or bool(existing.steps)
    if existing.end is not None:
        raise PoolConflict(f"rollout {name!r} is in this pool with different content; import into another folder")
    nodes = {node.id: node for node in rollout.nodes}
    stored = {node.id for node in existing.nodes}
    for step in rollout.steps[len(existing.steps) :]:
        await pool.append(step, None if step.node in stored else nodes[step.node])
        stored.add(step.node)
    for grade in rollout.grades:
        await pool.grade(grade)
    for mark in rollout.marks:
        await pool.mark(mark)
    if rollout.end is not None:
        await pool.end(name, rollout.end, rollout.message)
    if await pool.rollout(name) != rollout:
        raise PoolError(
            f"rollout {name!r} reads back differently from how it was exported; import it with the penstock that wrote it"
        )
    return False


async def _mark_trained(pool: Pool, history: GroupHistory, version: int) -> list[str]:
    """Enter the group into the ledger. Returns the leases that hold back complete groups before it."""
    held: list[str] = []
    while lease := await pool.claim(1, channel=history.group.channel, version=0, max_staleness=ANY_AGE, lease_s=HOLD_S):
        if lease.groups[0].id == history.group.id:
            await pool.ack(lease.id, version)
            return held
        held.append(lease.id)
    for lease_id in held:
        await pool.release(lease_id)
    raise PoolConflict(
        f"group {history.group.id!r} was trained into version {version}, but here it cannot be; import into another folder"
    )


def escape(message: str) -> str:
    """Text with lone surrogates in a form that any file can hold; other text, unless it begins with NUL, as it is."""
    if not message.startswith("\0") and not any("\ud800" <= character <= "\udfff" for character in message):
        return message
    return "\0" + message.encode("utf-8", "surrogatepass").hex()


def unescape(text: str) -> str:
    """What `escape` was given."""
    return bytes.fromhex(text[1:]).decode("utf-8", "surrogatepass") if text.startswith("\0") else text
