"""Formats an evaluation for people: table row, labelled fields, results."""

from typing import Any

from osmosis_ai.cli.figures import NONE, duration, moment, percent, plain, settings, two_digits
from osmosis_ai.cli.records import PENDING, Record, below, eval_item
from osmosis_ai.cli.runs import progress


def listed(item: Record, summary: Record) -> list[str]:
    """Returns the cells of a table row."""
    reward = two_digits(summary.get("avg_reward"))
    return [
        item["name"],
        f"[{item['status']}]",
        plain(item["rollout"]),
        reward,
        moment(item["created_at"]),
        plain(item["creator_name"]),
    ]


def labelled(row: Record, summary: Record, export: Record | None) -> dict[str, Any]:
    """Returns the values by label, in display order."""
    item = eval_item(row)
    waits = item["status"] in PENDING
    return {
        "Name": item["name"],
        "Status": item["status"],
        "Progress": "waits to be started" if waits else progress(summary),
        "Duration": duration(below(export or {}, "eval_run").get("duration_ms")),
        "Pass Rate": percent(summary.get("pass_rate")),
        "Tokens Used": summary.get("total_tokens"),
        "Submitted": moment(item["created_at"]),
        "Submitted By": item["creator_name"],
        "Started": moment(item["started_at"]) if item["started_at"] else None,
        "Completed": moment(item["completed_at"]) if item["completed_at"] else None,
        "Dataset": item["dataset"],
        "Model": item["model"],
        "Rollout": item["rollout"],
    }


def results_of(summary: Record, results: Record) -> list[str]:
    """Returns one line for each known part of the results."""
    stats = dict(results.get("reward_stats") or {})
    pass_at_k: Record = stats.pop("pass_at_k", None) or {}
    short: Record = results.get("shortfalls") or {}
    names = ("graded", "passed") if short else ("graded", "passed", "failed", "skipped")
    counts = [f"{name} {summary[name]}" for name in names if name in summary]
    counts += [f"{name} {each['count']}" for name, each in short.items()]
    parts = {
        "Results": ", ".join(counts),
        **{name.capitalize(): each["reason"] for name, each in short.items()},
        "Pass Threshold": summary.get("pass_threshold"),
        "Reward Stats": settings(stats),
        "Pass@k": ", ".join(f"{k}: {NONE if value is None else f'{value:.3f}'}" for k, value in pass_at_k.items()),
    }
    return [f"{label}: {value}" for label, value in parts.items() if value not in (None, "")]
