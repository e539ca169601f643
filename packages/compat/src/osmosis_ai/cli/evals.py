"""`osmosis eval`: submit, show, stop and download evaluations."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from osmosis_ai.cli.connection import All, Connection, Cursor, Limit, LogLimit, connect, fetch_page, show_logs
from osmosis_ai.cli.output import (
    NONE,
    CliError,
    Detail,
    Listing,
    Operation,
    Terminal,
    duration,
    moment,
    percent,
    plain,
    settings,
    size,
    terminal,
    two_digits,
)
from osmosis_ai.cli.records import PENDING, Record, below, eval_details, eval_export, eval_item, eval_row, eval_summary
from osmosis_ai.cli.rubric import rubric
from osmosis_ai.cli.runs import Config, Name, Yes, configuration, measured, progress, stop_run, submit_run
from penstock.errors import ConfigError, ControllerError
from penstock_controller.downloads import DownloadResult, download_files

ALL = ("metrics", "trajectories", "artifacts", "logs")
DEFAULT = ("metrics", "trajectories")
LARGE = 100 * 1024 * 1024
"""Larger downloads, in bytes, need a confirmation."""
PATHS = {
    "metrics": re.compile(r"metrics\.json"),
    "trajectories": re.compile(r"summary\.jsonl|trajectories/row_\d+_run_\d+\.json"),
    "artifacts": re.compile(r"artifacts/row_\d+_run_\d+/(?!manifest\.json$).+"),
    "logs": re.compile(r"logs\.txt"),
}
ROWS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")

app = typer.Typer(help="Evaluate agents.", no_args_is_help=True)
app.command("rubric")(rubric)


@app.command("submit")
def submit(context: typer.Context, config: Config, yes: Yes = False) -> Operation:
    """Check an evaluation's file, ask, and queue it. The workspace's files go along as they are."""
    return submit_run("eval", config, terminal(context), yes=yes)


@app.command("list")
def list_evaluations(limit: Limit = 50, everything: All = False) -> Listing:
    """List evaluations, newest first."""
    here = connect()
    page = fetch_page(
        lambda rows, at: here.client.runs("eval", limit=rows, offset=at), "eval_runs", limit=limit, everything=everything
    )
    return Listing(
        items=[eval_item(row) | {"summary": eval_summary(row)} for row in page.rows],
        shown=[listed(eval_item(row), eval_summary(row)) for row in page.rows],
        titles=["Name", "Status", "Rollout", "Reward", "Submitted", "By"],
        extra=here.where,
        **page.listed(),
    )


@app.command("info")
def show(
    context: typer.Context,
    name: Name,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder that metrics.json is saved in.")] = None,
) -> Detail:
    """Show an evaluation and its numbers; for people, metrics.json is saved as well."""
    here = connect()
    detail = here.client.run("eval", name)
    row = eval_row(detail)
    numbers = measured(
        lambda: here.client.metrics("eval", row["id"]), lambda got: eval_export(detail, got), pending=row.get("status") in PENDING
    )
    saved, warning = _save(terminal(context), here, row, output) if numbers.export else (None, None)
    results: Record = row.get("results") or {}
    summary = eval_summary(row) | eval_details(results)
    others = {
        key: detail.get(key)
        for key in ("entrypoint", "commit_sha", "branch", "env_config", "resolved_secret_scopes", "dataset_df_stats")
    }
    data = {
        "eval_run": eval_item(row),
        "summary": summary,
        **{key: row.get(key) for key in ("config", "results", "model", "dataset", "rollout")},
        **others,
        **numbers.as_json(),
        "output_path": saved,
        "save_warning": warning,
        **here.where,
    }
    sections = {"Configuration": configuration(detail), "Results": results_of(summary, results)}
    return Detail(data=data, fields=labelled(row, summary, numbers.export) | {"Saved": saved or warning}, sections=sections)


@app.command("logs")
def logs(name: Name, limit: LogLimit = 50, cursor: Cursor = None) -> Listing:
    """Show what an evaluation's process said, oldest line first."""
    here = connect()
    return show_logs(lambda rows, at: here.client.logs("eval", name, limit=rows, cursor=at), here, limit=limit, cursor=cursor)


@app.command("download")
def download(
    context: typer.Context,
    name: Name,
    types: Annotated[str, typer.Option("--type", help=f"Some of {', '.join(ALL)}, or all.")] = ",".join(DEFAULT),
    rows: Annotated[str | None, typer.Option("--rows", help="Only these rows of the dataset, such as 3,7,10-20.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder; else .osmosis/evals/NAME in the workspace.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Fetch files again that are there.")] = False,
    yes: Yes = False,
) -> Operation:
    """Fetch what an evaluation left: metrics, trajectories, artifacts, logs."""
    selection = Selection.read(types, rows)
    return download_outputs(connect(), name, selection, terminal(context), output=output, overwrite=overwrite, yes=yes)


@app.command("stop")
def stop(context: typer.Context, name: Name, yes: Yes = False) -> Operation:
    """Stop an evaluation; what it has done so far is kept."""
    return stop_run("eval", name, terminal(context), yes=yes)


def _save(term: Terminal, here: Connection, row: Record, output: Path | None) -> tuple[str | None, str | None]:
    """Returns the path of the saved metrics.json, or the error. Scripts get a file only if they pass a path."""
    if output is None and term.mode != "human":
        return None, None
    try:
        fetched = download_outputs(here, row["id"], Selection(("metrics",), None), term, output=output, overwrite=True, yes=True)
    except (ConfigError, ControllerError) as error:
        return None, f"metrics.json was not saved: {error}"
    return str(Path(fetched.resource["output_path"]) / "metrics.json"), None


# Lines for people


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


# Downloads


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected files of an evaluation."""

    types: tuple[str, ...]
    rows: str | None
    """Row numbers and ranges, such as `3,7,10-20`; None means all."""

    @classmethod
    def read(cls, types: str, rows: str | None) -> "Selection":
        chosen = {word.strip() for word in types.split(",") if word.strip()}
        if not chosen or chosen - {*ALL, "all"}:
            raise CliError(f"--type {types}: choose out of {', '.join(ALL)}, or all")
        packed = rows.replace(" ", "") if rows is not None else None
        if packed is not None and not ROWS.fullmatch(packed):
            raise CliError(f"--rows {rows}: write row numbers and ranges, such as 3,7,10-20")
        return cls(ALL if "all" in chosen else tuple(one for one in ALL if one in chosen), packed)

    def type_of(self, path: str) -> str | None:
        """Returns the type of a file, or None if the file is not selected or its path is unsafe."""
        fit = (name for name in self.types if PATHS[name].fullmatch(path))
        return None if "\\" in path or ".." in path.split("/") else next(fit, None)


def download_outputs(
    here: Connection, name: str, selection: Selection, terminal: Terminal, *, output: Path | None, overwrite: bool, yes: bool
) -> Operation:
    """Downloads the files. If some fail, the others are still downloaded and the result is `partial`."""
    run = eval_row(here.client.run("eval", name))
    if run.get("status") in PENDING:
        raise CliError(f"The evaluation {run['name']} has not begun; there is nothing to download yet")
    manifest = here.client.manifest("eval", run["id"], types=selection.types, rows=selection.rows)
    listed: list[Record] = manifest.get("files") or []
    files, refused = _sorted_out(listed, selection)
    if not files:
        raise CliError(f"The evaluation {run['name']} has none of these files: {', '.join(selection.types)}", files_failed=refused)
    total = sum(file["size"] for file in files)
    if total > LARGE:
        terminal.confirm(
            f"Download {size(total)}?", yes=yes, summary={"Name": run["name"], "Files": len(files), "Size": size(total)}
        )
    root = output or here.workspace / ".osmosis" / "evals" / _folder_name(run)
    fetched = download_files(here.client, "eval", run["id"], files, root, overwrite=overwrite)
    failed = refused + [{"path": path, "error": error} for path, error in fetched.failed.items()]
    resource = _resource(run, selection, files, fetched) | {"files_failed": failed, "manifest_totals": below(manifest, "totals")}
    outcome = {"status": "partial" if failed else "success", "output_path": str(root), "rows": selection.rows}
    counts = f"{len(fetched.downloaded)} fetched, {len(fetched.skipped)} there already, {len(failed)} failed"
    return Operation(
        operation="eval.download",
        status=outcome["status"] or "",
        message=f"Files of {run['name']} in {root}: {counts}.",
        resource=resource | outcome | here.where,
        hints=[f"{one['path']}: {one['error']}" for one in failed],
        exit_code=1 if failed else 0,
    )


def _sorted_out(listed: list[Record], selection: Selection) -> tuple[list[Record], list[Record]]:
    """Returns the accepted files, and the refused ones with the reason."""
    files: dict[str, Record] = {}
    refused: list[Record] = []
    for file in listed:
        path = str(file.get("path"))
        if path in files:
            refused.append({"path": path, "error": "it is listed twice"})
        elif selection.type_of(path) is None:
            refused.append({"path": path, "error": "no file of the types that were asked for"})
        else:
            files[path] = file
    return list(files.values()), refused


def _resource(run: Record, selection: Selection, files: list[Record], fetched: DownloadResult) -> dict[str, Any]:
    breakdown = {name: {"files": 0, "bytes": 0} for name in selection.types}
    for file in files:
        kind = breakdown[selection.type_of(file["path"]) or ""]
        kind["files"] += 1
        kind["bytes"] += file["size"]
    return {
        "eval_run": {"id": run["id"], "name": run["name"]},
        "selected_types": list(selection.types),
        "files_downloaded": len(fetched.downloaded),
        "files_skipped": len(fetched.skipped),
        "bytes_downloaded": fetched.bytes,
        "total_files": len(files),
        "total_bytes": sum(file["size"] for file in files),
        "breakdown": breakdown,
    }


def _folder_name(run: Record) -> str:
    """Returns the run's name if it is a safe file name, or else a cleaned name with the run's id."""
    name = str(run["name"])
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name).strip('-')}-{run['id']}"
