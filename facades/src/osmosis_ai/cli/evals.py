"""`osmosis eval`: submit, show, stop and download evaluations."""

from pathlib import Path
from typing import Annotated

import typer

from osmosis_ai.cli.connection import Connection, connect
from osmosis_ai.cli.eval_lines import labelled, listed, results_of
from osmosis_ai.cli.exports import eval_export
from osmosis_ai.cli.output import Terminal, terminal
from osmosis_ai.cli.outputs import ALL, DEFAULT, Selection, download_outputs
from osmosis_ai.cli.paging import All, Cursor, Limit, LogLimit, fetch_page, show_logs
from osmosis_ai.cli.records import PENDING, Record, eval_details, eval_item, eval_row, eval_summary
from osmosis_ai.cli.results import Detail, Listing, Operation
from osmosis_ai.cli.rubric import rubric
from osmosis_ai.cli.runs import Config, Name, Yes, configuration, measured, stop_run
from osmosis_ai.cli.submission import submit as submit_run
from penstock.errors import ConfigError, ControllerError

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
    beside = {
        key: detail.get(key)
        for key in ("entrypoint", "commit_sha", "branch", "env_config", "resolved_secret_scopes", "dataset_df_stats")
    }
    data = {
        "eval_run": eval_item(row),
        "summary": summary,
        **{key: row.get(key) for key in ("config", "results", "model", "dataset", "rollout")},
        **beside,
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
