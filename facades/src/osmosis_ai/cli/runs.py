"""Functions shared by evaluations and training runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from osmosis_ai.cli.connection import connect
from osmosis_ai.cli.figures import settings
from osmosis_ai.cli.output import Terminal
from osmosis_ai.cli.records import Record
from osmosis_ai.cli.results import Operation
from osmosis_ai.cli.submission import WORDS, Kind
from penstock.errors import ControllerError

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The experiment's TOML file.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name or id of the run.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]


class Numbers(NamedTuple):
    """A run's metrics, or the reason why there are none."""

    export: Record | None
    error: str | None

    def as_json(self) -> dict[str, Any]:
        return {"metrics": self.export, "metrics_available": self.export is not None, "metrics_error": self.error}


def measured(ask: Callable[[], Record], convert: Callable[[Record], Record], *, pending: bool) -> Numbers:
    """Reads a run's metrics. A failure is returned, not raised, so that the run can still be shown."""
    if pending:
        return Numbers(None, "A run that waits has no metrics yet.")
    try:
        return Numbers(convert(ask()), None)
    except ControllerError as error:
        return Numbers(None, str(error))
    except KeyError as missing:
        return Numbers(None, f"the controller's reply has no {missing}")


def stop_run(kind: Kind, name: str, terminal: Terminal, *, yes: bool) -> Operation:
    here = connect()
    terminal.confirm(f"Stop the {WORDS[kind]} {name}?", yes=yes, summary={"Name": name})
    here.client.stop(kind, name)
    return Operation(operation=f"{kind}.stop", message=f"Stopped the {WORDS[kind]} {name}.", resource={"name": name, **here.where})


def configuration(detail: Record) -> list[str]:
    """Returns one line for each known part of a run's setup."""
    labels = {
        "Entrypoint": detail.get("entrypoint"),
        "Config": settings(detail.get("config")),
        "Branch": detail.get("branch"),
        "Commit": (detail.get("commit_sha") or "")[:7],
        "Secrets": settings(detail.get("resolved_secret_scopes")),
        "Environment Variables": settings(detail.get("env_config")),
    }
    return [f"{label}: {value}" for label, value in labels.items() if value]


def progress(summary: Record) -> str | None:
    """Formats as `3 / 8 samples`."""
    found = summary.get("progress")
    return f"{found['completed']} / {found['total']} {found['unit']}" if found else None
