"""Formats a training run for people: table row, labelled fields, checkpoints."""

from collections.abc import Sequence
from typing import Any

from osmosis_ai.cli.figures import duration, moment, plain, two_digits
from osmosis_ai.cli.records import PENDING, Record, below, training_item
from osmosis_ai.cli.runs import progress


def checkpoint_lines(checkpoints: Sequence[Record]) -> list[str]:
    return [f"Checkpoint: {one['checkpoint_name']} step {one['checkpoint_step']} [{one['status']}]" for one in checkpoints]


def listed(item: Record) -> list[str]:
    """Returns the cells of a table row."""
    names = [plain(item["model_name"]), plain(item["rollout_name"])]
    when = [moment(item["created_at"]), plain(item["creator_name"])]
    return [plain(item["name"]), f"[{item['status']}]", *names, two_digits(item.get("reward")), *when]


def labelled(row: Record, summary: Record, export: Record | None) -> dict[str, Any]:
    """Returns the values by label, in display order."""
    item = training_item(row)
    return {
        "Name": item["name"],
        "Status": str(item["status"]).title(),
        "Progress": "waits to be started" if item["status"] in PENDING else progress(summary),
        "Duration": duration(below(export or {}, "training_run").get("duration_ms")),
        "Examples Processed": row.get("examples_processed_count"),
        "Submitted": moment(item["created_at"]),
        "Submitted By": item["creator_name"],
        "Dataset": item["dataset_name"],
        "Base Model": item["model_name"],
        "Rollout": item["rollout_name"],
        "Started": moment(item["started_at"]) if item["started_at"] else None,
        "Completed": moment(item["completed_at"]) if item["completed_at"] else None,
        "Notes": row.get("notes"),
    }
