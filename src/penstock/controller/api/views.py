"""The platform's JSON views of runs, in lists, details and trajectories. Pure functions."""

from typing import Any

import orjson

from penstock.controller.api.bodies import as_object
from penstock.controller.api.curves import TrainingProgress
from penstock.controller.runs import Run
from penstock.evals.spending import rollout_usage
from penstock.records import Attempt, Task
from penstock.rollout.transcripts import transcripts

NOT_SHOWN = ("experiment", "env", "secrets", "model", "agent", "dataset", "run")
"""Tables that a detail shows elsewhere, or not at all."""


def accepted(run: Run) -> dict[str, Any]:
    return {"id": run.id, "name": run.name, "status": run.status, "created_at": run.created_at}


def eval_row(run: Run, results: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    return {**_scalars(run), **_references(run), "results": results, "config": _eval_config(run, settings)}


def eval_detail(run: Run, results: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    config = _eval_config(run, settings)
    return {"eval_run": _scalars(run), "config": config, "results": results, **_references(run), **_origin(run)}


def training_row(run: Run, progress: TrainingProgress, steps: int | None) -> dict[str, Any]:
    """Returns the view in a list; `steps` is the planned number."""
    return {**_scalars(run), **_references(run), **_progress(progress, steps)}


def training_detail(run: Run, progress: TrainingProgress, steps: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    more = {"examples_processed_count": progress.examples, "notes": run.message or None}
    scalars = {**_scalars(run), **_progress(progress, steps), **more}
    return {"training_run": scalars, "config": _training_config(run, settings), **_references(run), **_origin(run)}


def _scalars(run: Run) -> dict[str, Any]:
    return {
        **accepted(run),
        "started_at": run.started_at,
        "completed_at": run.ended_at,
        "creator_name": run.submission.creator or None,
        "creator_email": None,
        "message": run.message or None,
        "stop_asked": run.stop_asked,
        "launches": run.launches,
    }


def _references(run: Run) -> dict[str, Any]:
    """Lists and details use different key names; each reference has all of them."""
    model, dataset, rollout = run.submission.model, run.submission.dataset, run.submission.rollout
    return {
        "model": {"id": model, "name": model, "model_name": model},
        "dataset": {"id": dataset, "name": dataset, "file_name": dataset, "digest": run.submission.dataset_digest},
        "rollout": {"id": rollout, "name": rollout},
    }


def _origin(run: Run) -> dict[str, Any]:
    submitted = run.submission
    return {
        "entrypoint": submitted.entrypoint,
        "repository": submitted.repository or None,
        "branch": submitted.branch,
        "commit_sha": submitted.commit_sha,
        "dirty": submitted.dirty,
        "snapshot": submitted.snapshot,
        "env_config": submitted.env,
        "resolved_secret_scopes": submitted.secrets,
        "is_internal_user": False,
    }


def _progress(progress: TrainingProgress, steps: int | None) -> dict[str, Any]:
    return {"current_step": progress.step, "total_steps": progress.steps or steps, "reward": progress.reward}


def _eval_config(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the submitted `[evaluation]` table, or else `[eval]`, plus model and attempts per row."""
    section: dict[str, Any] = settings.get("eval", {})
    table = as_object(run.submission.tables.get("evaluation")) or {key: value for key, value in section.items() if key != "samples"}
    return {**_plain(table), "model_path": run.submission.model, "n": section.get("samples", 1)}


def _training_config(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    submitted = {key: _plain(as_object(table)) for key, table in run.submission.tables.items() if key not in NOT_SHOWN}
    tables = {key: table for key, table in submitted.items() if table}
    return {"model_path": run.submission.model, **(tables or {"train": _plain(settings.get("train", {}))})}


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    """Returns the table without unset values."""
    return {key: value for key, value in table.items() if value is not None and value != ""}


def trajectory(run: Run, row: int, task: Task, attempt: Attempt) -> bytes:
    """Returns an attempt as JSON: transcripts with messages and tools, grades, and model calls with tokens and time."""
    by_name, spent = transcripts(attempt), rollout_usage(attempt)
    first = next(iter(by_name.values()), None)
    content: dict[str, Any] = {
        "eval_run": {"id": run.id, "name": run.name},
        "row": row,
        "run": attempt.rollout.place,
        "rollout_id": attempt.rollout.id,
        "task": {"id": task.id, "prompt": task.prompt, "label": task.label, "metadata": task.metadata},
        "end": attempt.end,
        "message": attempt.message,
        "reward": attempt.reward,
        "grades": [{"source": g.source, "reward": g.reward, "transcript": g.transcript, "step": g.step} for g in attempt.grades],
        "messages": first.messages if first else [],
        "transcripts": {name: {"messages": each.messages, "tools": each.tools} for name, each in by_name.items()},
        "calls": _calls(attempt),
        "tokens": {"prompt": spent.prompt_tokens, "sampled": spent.completion_tokens},
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def _calls(attempt: Attempt) -> list[dict[str, Any]]:
    return [
        {
            "index": step.index,
            "transcript": step.transcript,
            "finish": step.finish,
            "sampled_tokens": step.sampled,
            "seconds": step.seconds,
            "temperature": step.sampling.temperature,
        }
        for step in attempt.steps
    ]
