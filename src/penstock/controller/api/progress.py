"""What an evaluation has come to so far, read from its pool while another process writes that; nothing is read twice."""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.config import EvalSection
from penstock.controller.runs import Run, RunFiles
from penstock.evals.spending import took
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Attempt, End
from penstock.run.folder import write_atomic

REMEMBERED = 200
"""Evaluations whose numbers are kept in memory."""
UNDONE = (End.CANCELLED, End.LOST)
"""Ends of attempts that are made again when the evaluation goes on: they count as not made."""


class Tried(NamedTuple):
    """An attempt that has ended, in a line."""

    rollout_id: str
    row: int
    place: int
    end: str
    reward: float
    """0 for one that failed."""
    message: str
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    """Of its model calls."""


@dataclass(slots=True)
class Seen:
    """What was read of an evaluation's pool."""

    position: int = 0
    """Of the last change that was looked at."""
    rows: set[int] = field(default_factory=set[int])
    """Tasks that are to be tried."""
    tried: dict[tuple[int, int], Tried] = field(default_factory=dict[tuple[int, int], Tried])
    """By row and place: the last attempt."""

    def ordered(self, rows: frozenset[int] | None = None) -> list[Tried]:
        """Attempts that count, by row and place."""
        found = [each for _, each in sorted(self.tried.items()) if each.end not in UNDONE]
        return found if rows is None else [each for each in found if each.row in rows]


class Evaluations:
    """Reads them."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, Seen] = OrderedDict()
        self._lock = asyncio.Lock()

    async def read(self, run: Run, files: RunFiles) -> Seen | None:
        """None before its process has begun."""
        folder, kept = files.results(run), files.path / "attempts.json"
        async with self._lock:
            seen = self._seen.get(run.id)
            if seen is None:
                seen = self._seen[run.id] = await asyncio.to_thread(_stored, kept) or Seen()
                while len(self._seen) > REMEMBERED:
                    self._seen.popitem(last=False)
            if run.status.over and kept.exists():
                return seen
            pool = await asyncio.to_thread(open_results, folder)
            if pool is None:
                return None
            try:
                await _advance(pool, seen)
            finally:
                await pool.close()
            if run.status.over:
                with suppress(OSError):  # a full disk: it is read again next time
                    await asyncio.to_thread(_store, kept, seen)
            return seen


def open_results(folder: Path) -> Pool | None:
    """The pool of a run's folder; None where there is none yet."""
    try:
        config: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())["config"]
    except (OSError, ValueError, LookupError):
        return None
    if config["pool"]["name"] == "sqlite" and not (folder / "pool.db").exists():
        return None
    return POOLS.load(config["pool"]["name"])(folder, url=config["pool"].get("url", ""))


def eval_section(files: RunFiles) -> EvalSection:
    """How the run was asked to evaluate."""
    try:
        return EvalSection.model_validate(orjson.loads(files.config.read_bytes()).get("eval", {}))
    except (OSError, ValueError):
        return EvalSection()


async def _advance(pool: Pool, seen: Seen) -> None:
    while changes := await pool.changes(seen.position):
        for change in changes:
            if change.kind == "opened":
                seen.rows.add(_row(change.id))
            elif change.kind == "ended":
                tried = _tried(await pool.attempt(change.id))
                known = seen.tried.get((tried.row, tried.place))
                if known is None or known.end in UNDONE or tried.end not in UNDONE:
                    seen.tried[tried.row, tried.place] = tried
            seen.position = change.position


def _tried(attempt: Attempt) -> Tried:
    rollout, spent = attempt.rollout, took(attempt)
    return Tried(
        rollout_id=rollout.id,
        row=_row(rollout.group_id),
        place=rollout.place,
        end=str(attempt.end),
        reward=attempt.reward or 0.0,
        message=attempt.message,
        calls=len(spent.call_s),
        prompt_tokens=spent.prompt_tokens,
        sampled_tokens=spent.completion_tokens,
        seconds=round(sum(spent.call_s), 4),
    )


def _row(group_id: str) -> int:
    """An evaluation numbers its groups by row: `eval-17`."""
    return int(group_id.rpartition("-")[2])


def _stored(file: Path) -> Seen | None:
    try:
        found = orjson.loads(file.read_bytes())
        tried = [Tried(*each) for each in found["tried"]]
        return Seen(found["position"], set(found["rows"]), {(each.row, each.place): each for each in tried})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _store(file: Path, seen: Seen) -> None:
    tried = [list(each) for each in seen.tried.values()]
    write_atomic(file, orjson.dumps({"position": seen.position, "rows": sorted(seen.rows), "tried": tried}))
