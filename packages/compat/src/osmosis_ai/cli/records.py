"""Converts a controller's records and metrics to the JSON that commands print and save. Pure functions."""

from datetime import UTC, datetime
from typing import Any

# Items

Record = dict[str, Any]

DATASET = (
    "id",
    "file_name",
    "file_size",
    "status",
    "file_format",
    "original_file_format",
    "row_count",
    "original_file_size",
    "creator_name",
    "created_at",
    "updated_at",
)
RUN = ("id", "name", "status", "created_at", "started_at", "completed_at", "creator_name", "creator_email")
SECRET = ("id", "name", "scope", "created_at", "updated_at", "creator_name", "updater_name")
ROLLOUT = ("id", "name", "is_active", "repo_full_name", "last_synced_commit_sha", "created_at")
CHECKPOINT = ("id", "checkpoint_name", "checkpoint_step", "status", "created_at")
COUNTS = ("pass_rate", "graded", "passed", "failed", "skipped")
TERMINAL = frozenset({"finished", "failed", "crashed", "stopped", "killed", "unknown"})
PENDING = frozenset({"pending", "queued"})


def taken(record: Record, names: tuple[str, ...], *, when_set: tuple[str, ...] = ()) -> Record:
    """Returns the fields `names`, None if missing, and those of `when_set` that are not None."""
    return {name: record.get(name) for name in names} | known({name: record.get(name) for name in when_set})


def known(record: Record) -> Record:
    return {name: value for name, value in record.items() if value is not None}


def below(record: Record, name: str) -> Record:
    """Returns the object under `name`, or an empty one."""
    found: Record | None = record.get(name)
    return found or {}


def dataset_item(record: Record) -> Record:
    """Returns a dataset's item."""
    return taken(record, DATASET, when_set=("platform_url",))


def eval_item(row: Record) -> Record:
    """Returns an evaluation's item from a list row."""
    names = {key: below(row, key).get("name") for key in ("model", "dataset", "rollout")}
    return taken(row, RUN) | names | known({key: row.get(key) for key in ("results", "config", "platform_url")})


def eval_row(detail: Record) -> Record:
    """Converts a detail to a list row of the same run."""
    model = {"name": below(detail, "config").get("model_path")}
    others = {key: detail.get(key) for key in ("dataset", "rollout", "results", "config")}
    return {**below(detail, "eval_run"), "model": model, **others}


def eval_summary(row: Record) -> Record:
    """Returns an evaluation's summary. Unknown numbers are left out."""
    results = below(row, "results")
    found = known({"avg_reward": results.get("score")} | {key: results.get(key) for key in COUNTS})
    rows, done, samples = results.get("sampled_rows"), results.get("total_runs"), below(row, "config").get("n")
    if rows is not None and done is not None and samples is not None:
        found["progress"] = {"completed": done, "total": rows * samples, "unit": "samples"}
    return found


def eval_details(results: Record) -> Record:
    """Returns the summary fields that only the detail view shows."""
    more = {key: results.get(key) for key in ("pass_threshold", "total_tokens", "resumed_count")}
    return known(more | {"dataset_rows": results.get("total_dataset_rows")})


def training_item(row: Record) -> Record:
    """Returns a training run's item from a list row."""
    references: Record = {}
    for key, inner in (("model", "model_name"), ("dataset", "file_name"), ("rollout", "name")):
        found = below(row, key)
        references |= {f"{key}_id": found.get("id"), f"{key}_name": found.get(inner) or found.get("name")}
    first, rest = RUN[:3], RUN[3:]
    item = taken(row, first) | references | taken(row, rest)
    return item | known({key: row.get(key) for key in ("platform_url", "current_step", "total_steps", "reward")})


def training_row(detail: Record) -> Record:
    """Converts a detail to a list row of the same run."""
    return {**below(detail, "training_run"), **{key: detail.get(key) for key in ("model", "dataset", "rollout")}}


def training_summary(row: Record) -> Record:
    """Returns reward and progress if known."""
    found = known({"reward": row.get("reward")})
    if row.get("total_steps") is not None:
        found["progress"] = {"completed": row.get("current_step") or 0, "total": row["total_steps"], "unit": "steps"}
    return found


def secret_item(record: Record) -> Record:
    """Returns a secret's item; the scope `user` becomes `personal`."""
    return taken(record, SECRET) | {"scope": "personal" if record.get("scope") == "user" else record.get("scope")}


# Metrics

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
