"""`penstock dataset`: check task files, upload them to a controller, preview and download them."""

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from penstock.cli.output import (
    All,
    AsJson,
    Limit,
    Plain,
    TableColumn,
    file_size,
    labelled_lines,
    local_time,
    print_result,
    print_table,
)
from penstock_controller.cli.connection import connect, fetch_page, transfer_progress

app = typer.Typer(help="Task files: check them, keep them with a controller, fetch them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The dataset's name or id.")]
COLUMNS = (
    TableColumn("name", lambda row: row.get("file_name")),
    TableColumn("status", lambda row: row.get("status")),
    TableColumn("rows", lambda row: row.get("row_count")),
    TableColumn("size", lambda row: file_size(row.get("file_size"))),
    TableColumn("uploaded", lambda row: local_time(row.get("created_at"))),
    TableColumn("by", lambda row: row.get("creator_name")),
)


@app.command()
def validate(file: Annotated[Path, typer.Argument(help="JSONL, CSV or parquet.")], as_json: AsJson = False) -> None:
    """Check every row of a local file; reports each error with its row."""
    from penstock.sdk.dataset import check_tasks
    from penstock_controller.downloads import check_dataset_file

    _, count = check_dataset_file(file)
    rows = check_tasks(file, columns=True)
    found = {"valid": True, "file": str(file), "rows": rows, "size": count}
    print_result(found, f"{file} is fine: {rows} rows.\n\n  next  penstock dataset upload {file}", as_json=as_json)


@app.command()
def upload(
    file: Annotated[Path, typer.Argument(help="JSONL, CSV or parquet.")],
    name: Annotated[str | None, typer.Option(help="Name of the dataset; by default the file's, without its suffix.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a dataset of the same name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a file to the controller, which checks every row. Runs can then use it by name."""
    from penstock.sdk.dataset import check_tasks
    from penstock_controller.downloads import check_dataset_file, upload_dataset

    check_dataset_file(file)
    check_tasks(file, columns=True)  # the controller looks at every row again; a bad file need not travel
    client = connect()
    with transfer_progress() as progress:
        record = upload_dataset(client, file, name=name, overwrite=overwrite, progress=progress)
    kept = record.get("file_name") or name or file.stem
    text = f"Uploaded {file} as dataset {kept} ({file_size(record.get('file_size'))}); it is {record.get('status')}."
    print_result(record, f"{text}\n\n  next  penstock dataset info {kept}", as_json=as_json)


@app.command("list")
def list_datasets(limit: Limit = 20, everything: All = False, plain: Plain = False, as_json: AsJson = False) -> None:
    """List the controller's datasets, newest first."""
    client = connect()
    page = fetch_page(lambda limit, offset: client.datasets(limit=limit, offset=offset), "datasets", limit, everything=everything)
    empty = "there is no dataset yet; begin with: penstock dataset upload FILE"
    print_table(page, "datasets", COLUMNS, as_json=as_json, plain=plain, empty=empty)


@app.command("info")
def details(name: Name, as_json: AsJson = False) -> None:
    """Show the details of a dataset."""
    record = connect().dataset(name)
    facts = [(column.title, column.cell(record)) for column in COLUMNS]
    shown = [("id", record.get("id")), *facts, ("format", record.get("file_format"))]
    record.pop("data_preview", None)
    print_result(record, f"{labelled_lines(shown)}\n\n  next  penstock dataset preview {name}", as_json=as_json)


@app.command()
def preview(
    name: Name,
    rows: Annotated[int, typer.Option(min=1, max=50, help="How many.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Print the first rows, one JSON object a line."""
    record = connect().dataset(name)
    known: list[dict[str, Any]] = record.get("data_preview") or []
    first = known[:rows]
    if not first:
        typer.echo(f"no rows can be shown: the dataset is {record.get('status')}; see: penstock dataset info {name}", err=True)
    text = "\n".join(orjson.dumps(row).decode() for row in first)
    print_result({"name": record.get("file_name"), "status": record.get("status"), "rows": first}, text, as_json=as_json)


@app.command()
def download(
    name: Name,
    output: Annotated[str | None, typer.Option("-o", "--output", help="A file, or a folder/; else the current folder.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a dataset's file as it was uploaded."""
    from penstock_controller.downloads import download_dataset

    client = connect()
    with transfer_progress() as progress:
        path = download_dataset(client, name, output, overwrite=overwrite, progress=progress)
    count = path.stat().st_size
    print_result(
        {"name": name, "path": str(path), "size": count},
        f"Fetched dataset {name} into {path} ({file_size(count)}).",
        as_json=as_json,
    )
