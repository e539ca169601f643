"""`osmosis dataset`: validate, upload, show and download datasets."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from osmosis_ai.cli.connection import All, Cursor, Limit, LogLimit, connect, fetch_page, show_logs
from osmosis_ai.cli.output import CliError, Detail, Listing, Operation, moment, plain, size, terminal
from osmosis_ai.cli.records import Record, dataset_item
from osmosis_ai.cli.runs import Yes
from penstock.errors import DatasetError
from penstock.sdk.dataset import DatasetRow, each_row, parse_json

app = typer.Typer(help="Datasets of a controller.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(metavar="FILE", help="A .jsonl, .csv or .parquet file.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name or id of the dataset.")]
USABLE = "uploaded"


@app.command("validate")
def validate(context: typer.Context, file: File) -> Detail:
    """Check a file, every row of it, without a controller."""

    found = check_file(file)
    data: dict[str, Any] = {
        "valid": not found.errors,
        **{"file": str(file), "file_name": file.name},
        "extension": file.suffix.removeprefix(".").lower(),
        "file_size": file.stat().st_size if file.is_file() else None,
    } | {"errors": found.errors, "warnings": found.warnings}
    if found.errors and terminal(context).mode == "json":
        raise CliError("\n  - ".join([f"{file} cannot be used as a dataset:", *found.errors]), **data)
    fields = {"File": file, "Valid": "yes" if not found.errors else "no", "Rows": found.rows}
    sections = {"Errors": [f"Error: {line}" for line in found.errors], "Warnings": [f"Warning: {line}" for line in found.warnings]}
    shown = {heading: lines for heading, lines in sections.items() if lines}
    return Detail(data=data, fields=fields, sections=shown, exit_code=1 if found.errors else 0)


@app.command("upload")
def upload(
    context: typer.Context,
    file: File,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a dataset of the same name.")] = False,
    yes: Yes = False,
) -> Operation:
    """Check a file and send it to the controller, named as the file is."""
    from penstock_controller.downloads import upload_dataset

    here = connect()
    found = check_file(file)
    if found.errors:
        raise CliError("\n  - ".join([f"{file} cannot be used as a dataset:", *found.errors]), errors=found.errors)
    for warning in found.warnings:
        terminal(context).warn(warning)
    prompt = f"Upload {file.name}" + (" over a dataset of the same name?" if overwrite else "?")
    terminal(context).confirm(prompt, yes=yes or not overwrite, summary={"Name": file.stem, "Size": size(file.stat().st_size)})
    record = upload_dataset(here.client, file, overwrite=overwrite)
    name = record.get("file_name")
    return Operation(
        operation="dataset.upload",
        message=f"Uploaded the dataset {name}.",
        resource=dataset_item(record) | here.where,
        steps=[{"action": "dataset_info", "name": name}],
        hints=[f"Look at it: osmosis dataset info {name}"],
    )


@app.command("download")
def download(
    name: Name,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File or folder; else the working directory.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> Operation:
    """Fetch a dataset's file."""
    from penstock_controller.downloads import download_dataset

    here = connect()
    record = here.client.dataset(name)
    if record.get("status") != USABLE:
        raise CliError(f"The dataset {name} is {record.get('status')}, not {USABLE}; wait until it is", status=record.get("status"))
    path = download_dataset(here.client, name, output, overwrite=overwrite)
    resource = dataset_item(record) | {"output_path": str(path)} | here.where
    return Operation(operation="dataset.download", message=f"Saved the dataset as {path}.", resource=resource)


@app.command("list")
def list_datasets(limit: Limit = 50, everything: All = False) -> Listing:
    """List datasets, newest first."""
    here = connect()
    page = fetch_page(lambda rows, at: here.client.datasets(limit=rows, offset=at), "datasets", limit=limit, everything=everything)
    return Listing(
        items=[dataset_item(record) for record in page.rows],
        shown=[_shown(record) for record in page.rows],
        titles=["Name", "Status", "Size", "Uploaded", "By"],
        extra=here.where,
        **page.listed(),
    )


@app.command("info")
def show(name: Name) -> Detail:
    """Show a dataset."""
    here = connect()
    item = dataset_item(here.client.dataset(name))
    fields = {
        "Name": item["file_name"],
        "Status": item["status"],
        "Size": size(item["file_size"]),
        "Format": item["file_format"],
        "Rows": item["row_count"],
        "Uploaded": moment(item["created_at"]),
        "Uploaded By": item["creator_name"],
        "Id": item["id"],
    }
    return Detail(data=item | here.where, fields=fields)


@app.command("preview")
def preview(name: Name, rows: Annotated[int, typer.Option("--rows", help="How many rows.")] = 5) -> Detail:
    """Show a dataset's first rows."""
    if rows < 1:
        raise CliError(f"--rows is {rows}; give a positive number")
    here = connect()
    record = here.client.dataset(name)
    found: list[Record] | None = record.get("data_preview")
    shown = (found or [])[:rows]
    counts = {"requested_rows": rows, "returned_rows": len(shown), "available": found is not None}
    absent = {} if found is not None else {"message": f"The dataset {name} is {record.get('status')}; its rows cannot be shown."}
    data = {"dataset": dataset_item(record), "rows": shown, **counts, **absent, **here.where}
    lines = {f"Row {place}": [f"{key}: {plain(value)}" for key, value in row.items()] for place, row in enumerate(shown)}
    return Detail(
        data=data, fields={"Name": record.get("file_name"), "Preview": absent.get("message") or len(shown)}, sections=lines
    )


@app.command("logs")
def logs(name: Name, limit: LogLimit = 50, cursor: Cursor = None) -> Listing:
    """Show what was noted while a dataset was received, oldest line first."""
    here = connect()
    return show_logs(lambda rows, at: here.client.dataset_logs(name, limit=rows, cursor=at), here, limit=limit, cursor=cursor)


def _shown(record: Record) -> list[str]:
    names = [plain(record.get("file_name")), f"[{record.get('status')}]", size(record.get("file_size"))]
    return [*names, moment(record.get("created_at")), plain(record.get("creator_name"))]


# Rules

LARGEST = 5 * 1024**3
FEWEST_ROWS = 4
LISTED = 20
"""The number of errors that are listed; the rest are counted."""
REQUIRED = ("system_prompt", "user_prompt")
TEXTS = (*REQUIRED, "ground_truth")


@dataclass(slots=True)
class DatasetIssues:
    rows: int = 0
    errors: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Shapes:
    """The shape of the metadata in the rows read so far."""

    types: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Maps a key's path to its JSON type and the row where it first occurs."""
    filled: bool = False
    present: bool = False


def check_file(path: Path) -> DatasetIssues:
    """Checks the whole file, one row at a time."""
    found, more = DatasetIssues(), 0
    for error in _flaws(path, found):
        if len(found.errors) < LISTED:
            found.errors.append(error)
        else:
            more += 1
    if more:
        found.errors.append(f"and {more} more")
    return found


def _flaws(path: Path, found: DatasetIssues) -> Iterator[str]:
    if path.is_file() and (size := path.stat().st_size) > LARGEST:
        yield f"{path}: {size} bytes; a dataset has at most 5 GB"
        return
    shapes = Shapes()
    try:
        with closing(each_row(path)) as rows:
            for row in rows:
                found.rows += 1
                yield from [str(row)] if isinstance(row, DatasetError) else _row_flaws(row, shapes)
    except DatasetError as flaw:
        yield str(flaw)
        return
    if found.rows < FEWEST_ROWS:
        yield f"{path}: {found.rows} rows; a dataset has at least {FEWEST_ROWS}"
    if shapes.present and not shapes.filled:
        yield f"{path}: metadata is an empty object in every row; leave the column out"


def _row_flaws(row: DatasetRow, shapes: Shapes) -> Iterator[str]:
    for name in REQUIRED:
        if name not in row.columns:
            meant = next((f"; there is {one!r}: names are case-sensitive" for one in row.columns if one.lower() == name), "")
            yield f"{row.where}: no column {name!r}{meant}"
    for name in TEXTS:
        value = row.columns.get(name)
        if value is not None and not isinstance(value, str):
            yield f"{row.where}: {name} is {type(value).__name__}; write it as text"
    if "user_prompt" in row.columns and not str(row.columns["user_prompt"] or "").strip():
        yield f"{row.where}: user_prompt is empty"
    yield from _metadata_flaws(row, shapes)


def _metadata_flaws(row: DatasetRow, shapes: Shapes) -> Iterator[str]:
    value = row.columns.get("metadata")
    try:
        if isinstance(value, str):
            value = parse_json(value, f"{row.where}: metadata") if value.strip() else None
    except DatasetError as flaw:
        yield str(flaw)
        return
    if value is None:
        return
    if not isinstance(value, dict):
        yield f"{row.where}: metadata is {type(value).__name__}; write an object, or one as JSON text"
        return
    metadata = cast("dict[str, Any]", value)
    shapes.present, shapes.filled = True, shapes.filled or bool(metadata)
    yield from _shape_flaws(metadata, "metadata", row.where, shapes)


def _shape_flaws(value: Mapping[str, Any], path: str, where: str, shapes: Shapes) -> Iterator[str]:
    for key, inner in value.items():
        here = f"{path}.{key}"
        kind = _kind(inner)
        known, first = shapes.types.setdefault(here, (kind, where)) if kind != "null" else (kind, where)
        if known != kind:
            yield f"{where}: {here} is {kind}, but {known} in {first}; keep one type"
        if isinstance(inner, dict):
            if not inner:
                yield f"{where}: {here} is an empty object; leave it out"
            yield from _shape_flaws(cast("dict[str, Any]", inner), here, where, shapes)
        elif isinstance(inner, int) and not -(2**63) <= inner < 2**63:
            yield f"{where}: {here} is an integer beyond 64 bits; write it as text"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: tuple[tuple[type, str], ...] = ((str, "string"), (int, "number"), (float, "number"), (dict, "object"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "another value")
