"""Submission of a config file to a controller: read and check it, pack the code, send both."""

import os
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import RunConfig, RunKind, load_config, override, read_toml
from penstock.errors import ConfigError, DatasetError
from penstock_controller.client import ControllerClient, ProgressCallback
from penstock_controller.experiment import is_experiment, read_experiment, to_body
from penstock_controller.snapshots import make_snapshot
from penstock_controller.workspace import Workspace, workspace_of

MAX_DATASET_BYTES = 64_000_000
"""A larger dataset file is not sent along with the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSubmission:
    """A submission that passed the local checks. The controller validates the rest."""

    kind: RunKind
    file: Path
    body: dict[str, Any]
    """The request body without the code."""
    folder: Path | None
    """The folder to pack; None if the file pins a branch or commit, which the controller takes from its own repository."""
    files: tuple[Path, ...] = ()
    """Files of the folder that are packed even if git ignores them."""
    rollout: str
    entrypoint: str
    model: str
    dataset: str
    branch: str | None = None
    commit_sha: str | None = None
    secrets: tuple[str, ...] = ()
    """Names of secrets that the controller must have."""


def submit(
    kind: RunKind,
    file: Path,
    client: ControllerClient,
    *,
    name: str | None = None,
    overrides: Iterable[str] = (),
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Queues a run of `file` (an experiment file or a run config); returns its `id, name, status, created_at`."""
    return send_submission(prepare_submission(kind, file, name=name, overrides=overrides), client, progress=progress)


def prepare_submission(kind: RunKind, file: Path, *, name: str | None = None, overrides: Iterable[str] = ()) -> PreparedSubmission:
    """Reads and checks a config file without a controller; ConfigError lists all problems."""
    assignments = list(overrides)
    tables = read_toml(file)
    if is_experiment(tables):
        override(tables, (f"advanced.{each}" for each in assignments))  # where it has the keys of a run config
        prepared = _prepare_experiment(kind, file, tables)
    else:
        override(tables, assignments)
        prepared = _prepare_run_config(kind, file, tables, assignments)
    if name is not None:
        prepared.body["name"] = name
    return prepared


def send_submission(
    prepared: PreparedSubmission, client: ControllerClient, *, progress: ProgressCallback | None = None
) -> dict[str, Any]:
    """Sends the code, then the submission; the run is queued when this returns."""
    if prepared.folder is None:
        return client.submit_run(prepared.kind, prepared.body)
    client.verify()  # report an unreachable controller or a wrong token before anything is packed
    if progress is not None:
        progress("packing the code", 0, None)
    with make_snapshot(prepared.folder, also=prepared.files) as snapshot:
        client.put_snapshot(snapshot.path, snapshot.digest, progress)
        origin = {"branch": snapshot.branch, "commit_sha": snapshot.commit_sha, "dirty": snapshot.dirty}
        if progress is not None:
            progress("the controller checks it", 0, None)
        return client.submit_run(prepared.kind, {**prepared.body, "snapshot": snapshot.digest, "origin": origin})


def _prepare_experiment(kind: RunKind, file: Path, tables: dict[str, Any]) -> PreparedSubmission:
    experiment = read_experiment(tables, kind, str(file))
    pinned = bool(experiment.branch or experiment.commit_sha)
    workspace = None if pinned else workspace_of(file.absolute().parent)
    return PreparedSubmission(
        kind=kind,
        file=file,
        body=to_body(tables),
        folder=workspace and workspace.path,
        files=() if workspace is None else _dataset_files(workspace, experiment.dataset),
        rollout=experiment.rollout,
        entrypoint=experiment.entrypoint,
        model=experiment.model_path,
        dataset=experiment.dataset,
        branch=experiment.branch,
        commit_sha=experiment.commit_sha,
        secrets=tuple(experiment.secrets),
    )


def _dataset_files(workspace: Workspace, dataset: str) -> tuple[Path, ...]:
    """Returns the workspace's file of a dataset, which git often ignores; nothing for a large one, which is uploaded separately."""
    with suppress(DatasetError):
        file = workspace.dataset(dataset)
        if file.is_relative_to(workspace.path) and file.stat().st_size <= MAX_DATASET_BYTES:
            return (file,)
    return ()


def _prepare_run_config(kind: RunKind, file: Path, tables: dict[str, Any], overrides: list[str]) -> PreparedSubmission:
    config = load_config(file, overrides)
    folder = _folder(file, config)
    dataset = config.dataset.eval if kind == "eval" and config.dataset.eval else config.dataset.train
    return PreparedSubmission(
        kind=kind,
        file=file,
        body={"run_config": {"tables": tables, "file": file.resolve().relative_to(folder).as_posix()}},
        folder=folder,
        files=tuple(path for path in _named_paths(config) if path.is_file()),
        rollout=config.run.name,
        entrypoint=config.agent.entry.name,
        model=config.model.name,
        dataset=dataset.name,
    )


def _folder(file: Path, config: RunConfig) -> Path:
    """Returns the smallest folder that contains the config file and all paths that it names."""
    paths = _named_paths(config)
    for path in (config.agent.entry, config.agent.folder):
        if not path.exists():
            raise ConfigError(f"{file}: {path} is named there and does not exist; correct the file")
    folder = Path(os.path.commonpath([file.resolve().parent, *(path if path.is_dir() else path.parent for path in paths)]))
    if folder in (Path(folder.anchor), Path.home()):
        raise ConfigError(
            f"{file} names files all over {folder}; put what belongs to the run into one folder, so that it can be sent"
        )
    return folder


def _named_paths(config: RunConfig) -> list[Path]:
    """Returns the existing paths that a config names. A missing dataset may be one of the controller's."""
    named = [config.agent.entry, config.agent.flows, config.agent.folder, config.dataset.train, config.dataset.eval]
    return [path.resolve() for path in named if path is not None and path.exists()]


def repository_name(folder: Path) -> str | None:
    """Returns `owner/name` from the URL of a folder's git remote `origin`; None if there is none."""
    command = ["git", "-C", str(folder), "config", "--get", "remote.origin.url"]
    try:
        url = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"([^/:\s]+/[^/:\s]+?)(?:\.git)?/?$", url.strip())
    return found[1].lower() if found else None
