"""The report of a run, from its folder alone: works while the run goes on, after it stopped, and on a colleague's machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import ConfigError
from penstock.evals.html import Pick
from penstock.evals.page import Heldout, RunFacts, render_page
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Attempt, End, Group, Task

SCANNED = 100
"""Groups read at the start and at the end of a run to choose transcripts from: a long run has more than a page should wait for."""


async def write_report(folder: Path) -> Path:
    """Write `report.html` into the run folder and return its path."""
    config = _run_config(folder)
    metrics = _read_lines(folder / "metrics.jsonl")
    summary = _read_object(folder / "summary.json")
    facts = RunFacts(
        name=config["run"]["name"],
        config=config,
        metrics=metrics,
        summary=summary,
        heldout=_heldout(_read_object(folder / "evals.json")),
        **await _recorded(folder, config),
    )
    path, draft = folder / "report.html", folder / "report.html.new"
    draft.write_text(render_page(facts), encoding="utf-8", errors="replace")
    return draft.replace(path)


def choose(groups: list[Group], replaced: Sequence[tuple[Task, Attempt]] = ()) -> list[Pick]:
    """The rollouts worth reading: first, last, best, worst, and the last of each way to fail; one that is several comes once.

    `replaced` are attempts that others took the place of, which failed or were lost too.
    """
    all_of_them = [(group.task, attempt) for group in groups for attempt in group.attempts if attempt.end is not None]
    graded = [(task, attempt, attempt.reward) for task, attempt in all_of_them if attempt.reward is not None]
    chosen: list[tuple[str, Task, Attempt]] = []
    if graded:
        newest_first = graded[::-1]
        best, worst = max(newest_first, key=lambda item: item[2]), min(newest_first, key=lambda item: item[2])
        named = [("first", graded[0]), ("last", graded[-1]), ("best", best), ("worst", worst)]
        chosen = [(why, task, attempt) for why, (task, attempt, _) in named]
    failed = {attempt.end: (task, attempt) for task, attempt in (*replaced, *all_of_them) if attempt.end is not End.COMPLETED}
    chosen += [("failed", task, attempt) for task, attempt in failed.values()]
    picks: dict[str, Pick] = {}
    for why, task, attempt in chosen:
        known = picks.get(attempt.rollout.id)
        picks[attempt.rollout.id] = Pick(why=f"{known.why}, {why}" if known else why, task=task, attempt=attempt)
    return list(picks.values())


def _heldout(evaluations: dict[str, float | None]) -> list[Heldout]:
    """In the order of their steps."""
    named = [(*when.rpartition("-")[::2], reward) for when, reward in evaluations.items()]
    return sorted(Heldout(int(step), when, reward) for when, step, reward in named)


def _run_config(folder: Path) -> dict[str, Any]:
    settings = _read_object(folder / "config.json")
    if "datasets" not in settings:  # a checkpoint has a config.json too
        raise ConfigError(f"{folder}: not a run folder; give one that `penstock train` made, such as runs/multiply")
    return settings["config"]


async def _recorded(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What the pool adds: ends, breaks and transcripts."""
    name = config["pool"]["name"]
    if name == "memory" or (name == "sqlite" and not (folder / "pool.db").exists()):
        return {"picked_from": "This run kept no transcripts."}
    pool: Pool = POOLS.load(name)(folder, url=config["pool"].get("url", ""))
    try:
        stats = await pool.stats("train")
        groups = await pool.groups("train", limit=SCANNED)
        rest = max(SCANNED, stats.last_seq + 1 - SCANNED)
        groups += await pool.groups("train", first_seq=rest, limit=SCANNED)
        replaced = [(group.task, attempt) for group in groups for attempt in await _replaced(pool, group)]
        ends = dict(sorted((await pool.stats()).ends.items(), key=lambda item: -item[1]))
    finally:
        await pool.close()
    scanned = "all training groups" if stats.last_seq < 2 * SCANNED else f"the first and the last {SCANNED} training groups"
    return {"ends": ends, "breaks": stats.breaks, "picks": choose(groups, replaced), "picked_from": f"Chosen among {scanned}."}


async def _replaced(pool: Pool, group: Group) -> list[Attempt]:
    """The attempts of a group that no longer count."""
    counting = {attempt.rollout.id for attempt in group.attempts}
    if all(attempt.rollout.attempt == 1 for attempt in group.attempts):
        return []
    return [await pool.attempt(rollout.id) for rollout in await pool.rollouts(group.id) if rollout.id not in counting]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, orjson.JSONDecodeError) as cause:
        raise ConfigError(f"{path}: cannot be read: {cause}; restore it, or train the run again with --fresh") from cause


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a JSONL file; a line that is still being written is left out."""
    if not path.exists():
        return []
    return [orjson.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"}\n")]
