"""`eval submit` and `train submit`: check the file, ask for confirmation, send the code, queue the run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from osmosis_ai.cli.connection import Connection, connect
from osmosis_ai.cli.output import CliError, Terminal
from osmosis_ai.cli.results import Operation

if TYPE_CHECKING:
    from penstock.controller.submit import PreparedSubmission

Kind = Literal["eval", "train"]
FOLDERS = {"eval": "configs/eval", "train": "configs/training"}
WORDS = {"eval": "evaluation", "train": "training run"}


def submit(kind: Kind, config: Path, terminal: Terminal, *, yes: bool) -> Operation:
    """Queues a run. Nothing is sent before the file is checked and the user has confirmed."""
    from penstock.controller.submit import prepare_submission, send_submission

    here = connect()
    file = _placed(kind, config, here.workspace)
    prepared = prepare_submission(kind, file)
    summary = {"Rollout": prepared.rollout, "Entrypoint": prepared.entrypoint, "Model": prepared.model, "Dataset": prepared.dataset}
    pinned = {"Branch": prepared.branch, "Commit": prepared.commit_sha, "Secrets": ", ".join(prepared.secrets)}
    shown = summary | {label: value for label, value in pinned.items() if value}
    terminal.confirm(f"Submit this {WORDS[kind]}?", yes=yes, summary=shown)
    return _told(kind, send_submission(prepared, here.client), prepared, here)


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


def _told(kind: Kind, record: dict[str, Any], prepared: "PreparedSubmission", here: Connection) -> Operation:
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
