"""`penstock report`: the report of a run, finished or not."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="For example runs/multiply.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the path as JSON.")] = False,
) -> None:
    """Write report.html into a run folder: reward curve, evaluation, ends, transcripts."""
    import asyncio

    import orjson

    from penstock.view.export import write_report

    path = asyncio.run(write_report(folder))
    typer.echo(orjson.dumps({"report": str(path)}).decode() if as_json else str(path))
