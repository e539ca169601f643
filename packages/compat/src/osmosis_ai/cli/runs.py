"""Functions shared by evaluations and training runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from osmosis_ai.cli.connection import Connection, connect
from osmosis_ai.cli.output import CliError, Operation, Terminal, settings
from osmosis_ai.cli.records import Record
from penstock.errors import ControllerError

if TYPE_CHECKING:
    from penstock_controller.submit import PreparedSubmission


# Submission

Kind = Literal["eval", "train"]
FOLDERS = {"eval": "configs/eval", "train": "configs/training"}
WORDS = {"eval": "evaluation", "train": "training run"}


def submit_run(kind: Kind, config: Path, terminal: Terminal, *, yes: bool) -> Operation:
    """Queues a run. Nothing is sent before the file is checked and the user has confirmed."""
    from penstock_controller.submit import prepare_submission, send_submission

    here = connect()
    file = _placed(kind, config, here.workspace)
    prepared = prepare_submission(kind, file)
    summary = {"Rollout": prepared.rollout, "Entrypoint": prepared.entrypoint, "Model": prepared.model, "Dataset": prepared.dataset}
    pinned = {"Branch": prepared.branch, "Commit": prepared.commit_sha, "Secrets": ", ".join(prepared.secrets)}
    shown = summary | {label: value for label, value in pinned.items() if value}
    terminal.confirm(f"Submit this {WORDS[kind]}?", yes=yes, summary=shown)
    return _submitted(kind, send_submission(prepared, here.client), prepared, here)


def _placed(kind: Kind, config: Path, workspace: Path) -> Path:
    """Returns the resolved file. Raises CliError if it is missing or not in the folder for its kind."""
    file = config.resolve()
    folder = workspace / FOLDERS[kind]
    if not file.is_relative_to(folder.resolve()):
        raise CliError(
            f"{config}: a file for `osmosis {kind} submit` lies under {FOLDERS[kind]}/ of the workspace {workspace}; move it there"
        )
    if not file.is_file():
        raise CliError(f"{config}: no such file; see what is in {folder}")
    return file


def _submitted(kind: Kind, record: dict[str, Any], prepared: "PreparedSubmission", here: Connection) -> Operation:
    name, url = record["name"], record.get("platform_url")
    config = {"rollout": prepared.rollout, "entrypoint": prepared.entrypoint, "model": prepared.model, "dataset": prepared.dataset}
    config |= {"branch": prepared.branch, "commit_sha": prepared.commit_sha}
    resource = {key: record[key] for key in ("id", "name", "status")}
    resource |= {"model_name": prepared.model, "dataset_name": prepared.dataset, "created_at": record["created_at"]}
    resource |= {"url": url} if url else {}
    steps: list[dict[str, Any]] = [{"action": f"{kind}_info", "name": name}, {"action": f"{kind}_list"}]
    return Operation(
        operation=f"{kind}.submit",
        message=f"Submitted the {WORDS[kind]} {name}.",
        resource={**resource, **here.where, "config": config},
        steps=steps + ([{"action": "open_url", "url": url}] if url else []),
        hints=[
            f"Status: {record['status']}",
            f"Follow it: osmosis {kind} info {name}",
            f"What it says: osmosis {kind} logs {name}",
        ],
    )


# Runs

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
