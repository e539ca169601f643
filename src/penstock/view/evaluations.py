"""Evaluations side by side: a table, a matrix of tasks by runs, and paired differences."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

from penstock.config import EvalSection
from penstock.errors import ConfigError, PenstockError, PoolError
from penstock.evals.metrics import difference, estimate, pass_at_k
from penstock.evals.outcome import CHANNEL
from penstock.pool import reads
from penstock.pool.base import AFTER_ALL, PoolDatabase
from penstock.view.overview import MAX_MODEL, last_text
from penstock.view.queries import cut, group_task
from penstock.view.run_files import ViewedRun
from penstock.view.sources import OpenRuns

MAX_TASKS = 5000
"""Tasks of an evaluation that are read; the others are only counted."""
MAX_SHOWN = 500
"""Tasks in the matrix, those with the worst regression first."""
MAX_COMPARED = 8
MAX_PROMPT = 200
"""Characters of a task's prompt."""


class TaskRewards(NamedTuple):
    task_id: str
    group_id: str
    rewards: list[float]
    """Of ended attempts; 0 for a failed one."""
    ends: list[str]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)


def evaluation_table(runs: OpenRuns, named: Sequence[str]) -> dict[str, Any]:
    """Returns all evaluations with their summaries; those in `named` also by task, the first as the baseline."""
    listed = list[dict[str, Any]]()
    for place in runs.source.places():
        try:
            files = runs.open(place)
        except (PenstockError, OSError, ValueError):
            continue
        if files.kind == "eval":
            listed.append({**_line(files, place.id), **place.label})
    listed.sort(key=lambda line: -line["changed"])
    return {"evaluations": listed, **(_matrix(runs, named) if named else {})}


def _line(files: ViewedRun, run_id: str) -> dict[str, Any]:
    outcome = files.summary().get("outcome")
    summary: dict[str, Any] = cast("dict[str, Any]", outcome) if isinstance(outcome, dict) else {}
    return {
        "id": run_id,
        "model": cut(str(files.setting("model", "name") or ""), MAX_MODEL),
        "status": files.status(),
        "changed": files.changed(),
        "tasks": summary.get("tasks"),
        "samples": summary.get("samples"),
        "rollouts": summary.get("rollouts"),
        "reward": summary.get("reward"),
        "passes": summary.get("passes"),
        "components": summary.get("components") or {},
        "ends": summary.get("ends"),
        "cost": summary.get("cost"),
        "notices": files.alarms.notices.total(),
    }


def _matrix(runs: OpenRuns, named: Sequence[str]) -> dict[str, Any]:
    read = {name: _scores(runs.get(name)) for name in named[:MAX_COMPARED]}
    first = read[named[0]]
    columns = [_column(name, tasks, first if name != named[0] else None, runs.get(name)) for name, tasks in read.items()]
    names = list(dict.fromkeys(task for tasks in read.values() for task in tasks))
    rows: list[dict[str, Any]] = [
        {
            "task": name,
            "cells": [_cell(tasks.get(name)) for tasks in read.values()],
            "change": _change(read[named[-1]].get(name), first.get(name)),
        }
        for name in names
    ]
    rows.sort(key=lambda row: row["change"] if row["change"] is not None else 9.0)
    shown = rows[:MAX_SHOWN]
    prompts = _prompts(runs, read, [row["task"] for row in shown])
    return {"columns": columns, "rows": [{**row, "prompt": prompts[row["task"]]} for row in shown], "tasks": len(rows)}


def _prompts(runs: OpenRuns, read: dict[str, dict[str, TaskRewards]], wanted: Sequence[str]) -> dict[str, str]:
    """Returns what each task asks, as the first evaluation that has it recorded it."""
    found = dict.fromkeys(wanted, "")
    for name, tasks in read.items():
        own = [task for task in wanted if task in tasks and not found[task]]
        with _open_pool(runs.get(name)) as database:
            for task in own:
                with suppress(PoolError):  # damaged
                    found[task] = cut(last_text(group_task(database, tasks[task].group_id)), MAX_PROMPT)
    return found


def _cell(task: TaskRewards | None) -> dict[str, Any] | None:
    if task is None:
        return None
    return {
        "mean": task.mean,
        "attempts": len(task.rewards),
        "group": task.group_id,
        "failed": len(task.ends) - task.ends.count("completed"),
    }


def _change(after: TaskRewards | None, before: TaskRewards | None) -> float | None:
    return None if after is None or before is None else after.mean - before.mean


def _column(name: str, tasks: dict[str, TaskRewards], baseline: dict[str, TaskRewards] | None, files: ViewedRun) -> dict[str, Any]:
    section = EvalSection.model_validate(files.config.get("eval", {}))
    whole = [task for task in tasks.values() if len(task.rewards) == section.samples]
    passes = {
        str(k): estimate([pass_at_k(len(t.rewards), sum(r >= section.passes for r in t.rewards), k) for t in whole])._asdict()
        for k in section.k
        if whole
    }
    shared = [task for task in (baseline or {}) if task in tasks]
    paired = difference([(baseline or {})[t].mean for t in shared], [tasks[t].mean for t in shared])._asdict() if shared else None
    reward = estimate([task.mean for task in tasks.values()])._asdict() if tasks else None
    return {"id": name, "reward": reward, "passes": passes, "paired": paired, "shared": len(shared), "tasks": len(tasks)}


@contextmanager
def _open_pool(files: ViewedRun) -> Generator[PoolDatabase]:
    if reason := files.why_no_pool():
        raise ConfigError(f"{files.path.name}: {reason}")
    with files.pool.kind.reading(files.path, files.pool.url) as database:
        yield database


def _scores(files: ViewedRun) -> dict[str, TaskRewards]:
    with _open_pool(files) as database:
        return _read_scores(database)


def _read_scores(database: PoolDatabase) -> dict[str, TaskRewards]:
    """Reads rewards without tokens and messages."""
    found: dict[str, TaskRewards] = {}
    query = """SELECT g.id, r.id FROM groups AS g JOIN rollouts AS r ON r.group_id = g.id
               WHERE g.channel = ? AND g.seq < ? AND r.current = 1 ORDER BY g.seq, r.place"""
    for group_id, rollout_id in database.execute(query, (CHANNEL, MAX_TASKS)).fetchall():
        attempt = reads.read_rollout(database, rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)
        if attempt.end is None:
            continue
        task = found.setdefault(attempt.ref.task_id, TaskRewards(attempt.ref.task_id, group_id, [], []))
        task.rewards.append(attempt.reward or 0.0)
        task.ends.append(str(attempt.end))
    return found
