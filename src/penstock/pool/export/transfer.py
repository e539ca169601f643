"""A pool written to files, and files read into a pool."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.errors import ConfigError, PoolConflict, PoolError
from penstock.pool.base import Pool
from penstock.pool.export import EXPORTS, IMPORTS
from penstock.pool.paging import Whole, every_whole
from penstock.records import Attempt, Task

HOLD_S = 3600.0
"""How long groups are kept aside while those behind them are marked as trained."""
ANY_AGE = 2**40
"""A staleness that no token exceeds."""

Told = Callable[[int], None]
"""Is told how many groups are done."""


class Sink(Protocol):
    """Takes groups one after the other; what it made is there, whole, once its context is left."""

    def write(self, whole: Whole) -> None:
        """Write one group down."""
        ...


OpenExport = Callable[[Path, Sequence[str]], AbstractContextManager[Sink]]
ReadExport = Callable[[Path], Iterable[Whole]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """How much was written or read."""

    groups: int = 0
    rollouts: int = 0
    steps: int = 0
    known: int = 0
    """Rollouts that were there already, the very same."""

    def plus(self, whole: Whole, known: int = 0) -> "Moved":
        """And one more group."""
        steps = sum(len(attempt.steps) for attempt in whole.attempts)
        return Moved(
            groups=self.groups + 1,
            rollouts=self.rollouts + len(whole.attempts),
            steps=self.steps + steps,
            known=self.known + known,
        )


async def export_pool(pool: Pool, out: Path, *, name: str, channels: Sequence[str], told: Told) -> Moved:
    """Write these channels to `out` in the format called `name`; it appears when it is whole, and an existing one is refused."""
    opened: OpenExport = EXPORTS.load(name)
    moved = Moved()
    with opened(out, channels) as sink:
        async for whole in every_whole(pool, channels):
            await asyncio.to_thread(sink.write, whole)
            moved = moved.plus(whole)
            told(moved.groups)
    return moved


def read_export(path: Path) -> Iterable[Whole]:
    """The groups in an exported file or folder; ConfigError where it is none that can be read back."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder; give what `penstock pool export` wrote")
    name = "jsonl" if path.is_file() else "parquet"
    if name == "parquet" and not (path / "groups.parquet").exists():
        raise ConfigError(
            f"{path}: not an export that can be read back; give a .jsonl file or a folder of parquet files "
            "(ATIF leaves out what a pool needs, so it is for other tools only)"
        )
    reading: ReadExport = IMPORTS.load(name)
    return reading(path)


async def import_pool(path: Path, pool: Pool, *, told: Told) -> Moved:
    """Put all groups of an export into `pool`. Doing it again, or going on after a kill, adds what is missing."""
    moved, trained, held = Moved(), dict(await pool.trained()), list[str]()
    groups = iter(read_export(path))
    try:
        while whole := await asyncio.to_thread(next, groups, None):
            known = await _add(pool, whole)
            if whole.trained is not None and trained.get(whole.group.id) != whole.trained:
                held += await _mark_trained(pool, whole, whole.trained)
            moved = moved.plus(whole, known)
            told(moved.groups)
    finally:
        for lease_id in held:
            await pool.release(lease_id)
    return moved


async def _add(pool: Pool, whole: Whole) -> int:
    """Store one group, its places side by side so that they share commits; the number of its rollouts that were there already."""
    group, places = whole.group, dict[int, list[Attempt]]()
    for attempt in whole.attempts:
        places.setdefault(attempt.rollout.place, []).append(attempt)
    await pool.open_group(group.task, [places[place][0].rollout for place in sorted(places)], seq=group.seq)
    try:
        async with asyncio.TaskGroup() as tasks:
            added = [tasks.create_task(_add_place(pool, group.task, attempts)) for attempts in places.values()]
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    return sum(task.result() for task in added)


async def _add_place(pool: Pool, task: Task, attempts: list[Attempt]) -> int:
    """Store the attempts at one place, each of them replacing the one before."""
    known, before = 0, None
    for attempt in attempts:
        if before is not None:
            await pool.replace(before.rollout, before.message)
        if await pool.task(attempt.rollout.id) != task:
            group_id = attempt.rollout.group_id
            raise PoolConflict(f"group {group_id!r} is in this pool with another task; import into another folder")
        known += await _add_attempt(pool, attempt)
        before = attempt
    return known


async def _add_attempt(pool: Pool, attempt: Attempt) -> bool:
    """Store what is missing of an attempt; True where nothing was, and there was something."""
    name = attempt.rollout.id
    there = await pool.attempt(name)
    if there == attempt:
        return there.end is not None or bool(there.steps)
    if there.end is not None:
        raise PoolConflict(f"rollout {name!r} is in this pool with different content; import into another folder")
    nodes = {node.id: node for node in attempt.nodes}
    stored = {node.id for node in there.nodes}
    for step in attempt.steps[len(there.steps) :]:
        await pool.append(step, None if step.node in stored else nodes[step.node])
        stored.add(step.node)
    for grade in attempt.grades:
        await pool.grade(grade)
    for mark in attempt.marks:
        await pool.mark(mark)
    if attempt.end is not None:
        await pool.end(name, attempt.end, attempt.message)
    if await pool.attempt(name) != attempt:
        raise PoolError(
            f"rollout {name!r} reads back differently from how it was exported; import it with the penstock that wrote it"
        )
    return False


async def _mark_trained(pool: Pool, whole: Whole, version: int) -> list[str]:
    """Enter the group into the ledger; complete groups that come before it are kept aside by the leases returned."""
    held: list[str] = []
    while lease := await pool.claim(1, channel=whole.group.channel, version=0, max_staleness=ANY_AGE, lease_s=HOLD_S):
        if lease.groups[0].id == whole.group.id:
            await pool.ack(lease.id, version)
            return held
        held.append(lease.id)
    for lease_id in held:
        await pool.release(lease_id)
    raise PoolConflict(
        f"group {whole.group.id!r} was trained into version {version}, but here it cannot be; import into another folder"
    )


def escape(message: str) -> str:
    """Text with lone surrogates in a form that any file can hold; other text, unless it begins with NUL, as it is."""
    if not message.startswith("\0") and not any("\ud800" <= character <= "\udfff" for character in message):
        return message
    return "\0" + message.encode("utf-8", "surrogatepass").hex()


def unescape(text: str) -> str:
    """What `escape` was given."""
    return bytes.fromhex(text[1:]).decode("utf-8", "surrogatepass") if text.startswith("\0") else text
