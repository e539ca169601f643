"""Converts a run's metrics to the form that the command line prints and saves. Pure functions."""

from datetime import UTC, datetime
from typing import Any

from osmosis_ai.cli.records import Record, eval_item, eval_row, known, training_item, training_row

RENAMED = {
    "rollout/raw_reward": "training_reward",
    "eval/validation/reward": "validation_reward",
    "train/entropy_loss": "entropy",
    "rollout/response_lengths": "response_length",
    "rollout/total_lengths": "total_length",
    "rollout/truncated_ratio": "truncation_ratio",
}
FIGURES = ("initial", "latest", "delta", "min", "max")


def eval_export(detail: Record, metrics: Record) -> Record:
    """Returns the metrics of an evaluation. Unknown values are left out."""
    run, overview = eval_item(eval_row(detail)), dict(metrics["overview"])
    names = {f"{key}_name": run[key] for key in ("dataset", "model", "rollout")}
    times = {key: run[key] for key in ("started_at", "completed_at")}
    head = {"id": metrics["eval_run_id"], "status": metrics["status"], "name": run["name"], **names}
    head |= {"duration_ms": overview.pop("duration_ms", None), **times}
    measured = {"reward_stats": metrics.get("reward_stats"), "pass_at_k": metrics.get("pass_at_k")}
    return {"eval_run": known(head), "summary": known(overview | measured)}


def training_export(detail: Record, metrics: Record) -> Record:
    """Returns a training run's fields, a summary and the points of each metric."""
    run, overview = training_item(training_row(detail)), metrics["overview"]
    head = {
        "id": metrics["training_run_id"],
        "status": metrics["status"],
        "name": run["name"],
        "base_model_name": run["model_name"],
    }
    head |= {"dataset_name": run["dataset_name"], "rollout_name": run["rollout_name"], "duration_ms": overview.get("duration_ms")}
    head |= {"started_at": run["started_at"], "completed_at": run["completed_at"]}
    head |= {"rows_processed": overview.get("examples_processed_count")}
    head |= {key: overview.get(key) for key in ("latest_step", "total_steps")}
    summaries: list[Record] = overview.get("metric_summaries") or []
    summary = {_renamed(one["key"]): {name: one.get(name) for name in FIGURES} for one in summaries}
    series: list[Record] = metrics.get("metrics") or []
    return {"training_run": head, "summary": summary, "metrics": [_metric(one) for one in series]}


def _metric(metric: Record) -> Record:
    points: list[Record] = metric.get("data_points") or []
    return {
        "key": _renamed(metric["metric_key"]),
        "title": metric.get("title"),
        "data": [{"step": one["step"], "value": one["value"], "timestamp": _iso(one["timestamp"])} for one in points],
    }


def _renamed(key: str) -> str:
    return RENAMED.get(key, key)


def _iso(milliseconds: Any) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat().replace("+00:00", "Z")
