"""`osmosis train`: submit, show and stop training runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from osmosis_ai.cli.connection import All, Connection, Cursor, Limit, LogLimit, connect, fetch_page, show_logs
from osmosis_ai.cli.output import Detail, Listing, Operation, Terminal, duration, moment, plain, terminal, two_digits
from osmosis_ai.cli.records import (
    CHECKPOINT,
    PENDING,
    TERMINAL,
    Record,
    below,
    known,
    taken,
    training_export,
    training_item,
    training_row,
    training_summary,
)
from osmosis_ai.cli.runs import Config, Name, Yes, configuration, measured, progress, stop_run, submit_run
from penstock.errors import ControllerError

app = typer.Typer(help="Train agents.", no_args_is_help=True)


@app.command("submit")
def submit(context: typer.Context, config: Config, yes: Yes = False) -> Operation:
    """Check a training run's file, ask, and queue it. The workspace's files go along as they are."""
    return submit_run("train", config, terminal(context), yes=yes)


@app.command("list")
def list_runs(limit: Limit = 50, everything: All = False) -> Listing:
    """List training runs, newest first."""
    here = connect()
    page = fetch_page(
        lambda rows, at: here.client.runs("train", limit=rows, offset=at), "training_runs", limit=limit, everything=everything
    )
    return Listing(
        items=[training_item(row) | {"summary": training_summary(row)} for row in page.rows],
        shown=[listed(training_item(row)) for row in page.rows],
        titles=["Name", "Status", "Base Model", "Rollout", "Reward", "Submitted", "By"],
        extra=here.where,
        **page.listed(),
    )


@app.command("info")
def show(
    context: typer.Context,
    name: Name,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="File, or folder with a / at its end, for the metrics.")
    ] = None,
) -> Detail:
    """Show a training run, its checkpoints and its metrics; for people, the metrics are saved as well."""
    here = connect()
    detail = here.client.run("train", name)
    row = training_row(detail)
    status = row.get("status")
    checkpoints = _checkpoints(here, name) if status in TERMINAL else []
    numbers = measured(
        lambda: here.client.metrics("train", row["id"]), lambda got: training_export(detail, got), pending=status in PENDING
    )
    saved, warning = _save(terminal(context), here, row, numbers.export, output) if numbers.export else (None, None)
    summary, details = training_summary(row), taken(row, ("examples_processed_count", "notes"))
    data = {
        "training_run": training_item(row) | details,
        "summary": summary,
        **known({"platform_url": row.get("platform_url")}),
        "checkpoints": checkpoints,
        "in_progress": status not in TERMINAL and status not in PENDING,
        **numbers.as_json(),
        "output_path": saved,
        "save_warning": warning,
        **here.where,
    }
    lines = checkpoint_lines(checkpoints)
    sections = {"Configuration": configuration(detail)} | ({"Checkpoints": lines} if lines else {})
    return Detail(data=data, fields=labelled(row, summary, numbers.export) | {"Saved": saved or warning}, sections=sections)


@app.command("logs")
def logs(name: Name, limit: LogLimit = 50, cursor: Cursor = None) -> Listing:
    """Show what a training run's process said, oldest line first."""
    here = connect()
    return show_logs(lambda rows, at: here.client.logs("train", name, limit=rows, cursor=at), here, limit=limit, cursor=cursor)


@app.command("stop")
def stop(context: typer.Context, name: Name, yes: Yes = False) -> Operation:
    """Stop a training run; its checkpoints are kept."""
    return stop_run("train", name, terminal(context), yes=yes)


def _checkpoints(here: Connection, name: str) -> list[Record]:
    try:
        found: list[Record] = here.client.checkpoints(name).get("checkpoints") or []
    except ControllerError:
        return []
    return [taken(one, CHECKPOINT) for one in found]


def _save(term: Terminal, here: Connection, row: Record, export: Record, output: str | None) -> tuple[str | None, str | None]:
    """Returns the path of the saved metrics, or the error. Scripts get a file only if they pass a path."""
    if output is None and term.mode != "human":
        return None, None
    default = f"{row.get('name') or 'run'}_{row['id'][:8]}.json"
    if output is None:
        file = here.workspace / ".osmosis" / "metrics" / default
    else:
        folder = output.endswith("/") or Path(output).is_dir()
        file = Path(output) / default if folder else Path(output).with_suffix(".json")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(orjson.dumps(export, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as cause:
        return None, f"{file}: the metrics were not saved: {cause.strerror}"
    return str(file), None


# Lines for people


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
