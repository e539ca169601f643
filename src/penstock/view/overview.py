"""The screens of runs: the list, one run, its curves and its groups. Each function returns plain JSON values."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from penstock.errors import PenstockError
from penstock.pool import reads
from penstock.pool.base import PoolDatabase
from penstock.records import Task
from penstock.view.credit import row_advantages
from penstock.view.queries import MEANINGS, REASONS, GroupRow, LeaseRow, check_ledger, cut, group_page, lease_rows, ledger_page
from penstock.view.run_files import AlarmLog, ViewedRun
from penstock.view.sources import OpenRuns

SPARK_POINTS = 60
MAX_MODEL = 200
"""Characters of a model's name in a list."""
MAX_POINTS = 5000
"""Steps in one answer; of a longer run every second, third, … one."""
AFTER_LAST = 2**62


def run_line(files: ViewedRun, run_id: str) -> dict[str, Any]:
    """Returns the line of a run in the list."""
    metrics = files.metrics
    mean = _evaluated_reward(files.summary())
    rewards = [reward for reward in metrics.columns["reward"] if reward is not None]
    reward = rewards[-1] if rewards else mean
    return {
        "id": run_id,
        "name": str(files.setting("run", "name") or files.path.name),
        "kind": files.kind,
        "status": files.status(),
        "model": cut(str(files.setting("model", "name") or ""), MAX_MODEL),
        "step": metrics.steps[-1] if metrics.steps else None,
        "steps": metrics.planned,
        "reward": reward,
        "first_reward": rewards[0] if rewards else None,
        "spark": thin(rewards, SPARK_POINTS),
        "alarms": files.alarms.counts.total() - files.alarms.counts["notice"],
        "changed": files.changed(),
    }


def _evaluated_reward(summary: dict[str, Any]) -> float | None:
    """Returns the mean reward of an evaluation; None in other runs."""
    outcome = summary.get("outcome")
    reward = cast("dict[str, Any]", outcome).get("reward") if isinstance(outcome, dict) else None
    value = cast("dict[str, Any]", reward).get("value") if isinstance(reward, dict) else None
    return value if isinstance(value, int | float) else None


def runs_list(runs: OpenRuns) -> dict[str, Any]:
    lines, unreadable = list[dict[str, Any]](), list[str]()
    for place in runs.source.places():
        try:
            lines.append({**run_line(runs.open(place), place.id), **place.label})
        except (PenstockError, OSError, ValueError) as error:
            unreadable.append(f"{place.id}: {error}")
    return {"runs": sorted(lines, key=lambda line: -line["changed"]), "unreadable": unreadable, "now": time.time()}


def run_overview(files: ViewedRun, run_id: str, database: PoolDatabase | None) -> dict[str, Any]:
    """Returns what the run's own screen shows besides the curves."""
    summary, metrics = files.summary(), files.metrics
    stats = asdict(reads.read_stats(database, None)) if database else {}
    lost = {
        "ends": {name: n for name, n in (stats.get("ends") or metrics.totals["ends"]).items() if name != "completed"},
        "drops": {**stats.get("drops", {}), **({"stale": stats["groups_stale"]} if stats.get("groups_stale") else {})},
        "masked": dict(metrics.totals["masked"]),
        "inexact": dict(metrics.totals["inexact"]),
        "breaks": stats.get("breaks") or dict(metrics.totals["breaks"]),
        "notices": files.alarms.notices.total(),
    }
    return {
        **run_line(files, run_id),
        "summary": {key: cut(value) for key, value in summary.items()},
        "heldout": files.heldout(),
        "tokens": dict(metrics.tokens),
        "damaged": metrics.damaged,
        "stats": stats,
        "train": asdict(reads.read_stats(database, "train")) if database else {},
        "channels": reads.list_channels(database) if database else [],
        "lost": lost,
        "reasons": {kind: _meanings(MEANINGS.get(kind, REASONS), counted) for kind, counted in lost.items()},
        "alarm_counts": [{"kind": kind, "text": AlarmLog.KINDS[kind], "count": n} for kind, n in files.alarms.counts.most_common()],
        "alarm_list": list(files.alarms.newest)[::-1],
        "pool": files.pool.name,
        "no_pool": files.why_no_pool(),
        "config": cut(files.config),
    }


def _meanings(known: Mapping[str, str], counted: Iterable[str]) -> dict[str, str]:
    return {name: known[name] for name in counted if name in known}


def metrics_columns(files: ViewedRun, *, after: int = 0) -> dict[str, Any]:
    """Returns the curves of all steps after a number, thinned out for a long run."""
    metrics = files.metrics
    first = next((at for at, step in enumerate(metrics.steps) if step > after), len(metrics.steps))
    stride = max(1, -(-(len(metrics.steps) - first) // MAX_POINTS))
    columns = {name: column[first::stride] for name, column in metrics.columns.items()}
    return {"steps": metrics.steps[first::stride], "columns": columns, "stride": stride}


def step_groups(files: ViewedRun, rows: Iterable[GroupRow], step: int) -> dict[str, Any]:
    entry = files.metrics.entry(step) or {}
    own = {key: value for key, value in entry.items() if not isinstance(value, list)}
    return {
        "step": step,
        "metrics": own,
        "groups": [group_line(files, row) for row in rows],
        "last": step == files.metrics.steps[-1],
    }


def group_list(files: ViewedRun, database: PoolDatabase, *, channel: str, state: str, before: int) -> dict[str, Any]:
    rows = group_page(database, channel, before=before, state=state)
    return {"groups": [group_line(files, row) for row in rows], "before": rows[-1].seq if rows else None}


def group_line(files: ViewedRun, row: GroupRow) -> dict[str, Any]:
    advantages = row_advantages(files, row.group)
    return {
        "id": row.id,
        "seq": row.seq,
        "channel": row.channel,
        "state": row.state,
        "task_id": row.task.id,
        "prompt": cut(last_text(row.task), 300),
        "rollouts": [
            {
                "id": attempt.ref.id,
                "place": attempt.ref.place,
                "attempt": attempt.ref.attempt,
                "end": attempt.end,
                "reward": attempt.reward,
                "advantage": advantages.get(attempt.ref.id),
                "message": cut(attempt.message, 300),
                "calls": row.sizes[attempt.ref.id][0],
                "tokens": row.sizes[attempt.ref.id][1],
            }
            for attempt in row.attempts
        ],
        "damaged": row.damaged,
    }


def last_text(task: Task) -> str:
    """Returns the last text of a task's prompt, which distinguishes it."""
    texts = [message.get("content") for message in task.prompt]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")


def pool_state(files: ViewedRun, database: PoolDatabase, *, before: int = AFTER_LAST) -> dict[str, Any]:
    """Returns the ledger and the counts of every channel."""
    channels = reads.list_channels(database)
    check = check_ledger(database)
    leases: list[LeaseRow] = lease_rows(database)
    return {
        "kind": files.pool.name,
        "bytes": files.pool.kind.size_bytes(files.path, files.pool.url),
        "channels": {name: asdict(reads.read_stats(database, name)) for name in channels},
        "position": reads.read_position(database),
        "ledger": [line._asdict() for line in ledger_page(database, before=before)],
        "check": {**check._asdict(), "is_exact": check.is_exact},
        "leases": [lease._asdict() for lease in leases],
        "format": "read only",
    }


def channel_names(database: PoolDatabase) -> list[str]:
    return reads.list_channels(database)


def failed_ends(database: PoolDatabase, channel: str) -> list[str]:
    return [end for end in reads.read_stats(database, channel).ends if end != "completed"]


def thin(values: list[float], most: int) -> list[float]:
    """Returns at most so many of the values, the last one included."""
    stride = max(1, -(-len(values) // most))
    return values[::-1][::stride][::-1]
