"""Resolves a submission's body into a run config, environment variables, secret names and a dataset file."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import Field

from penstock.config import RunConfig, make_config, validate
from penstock.controller.context import Controller
from penstock.controller.datasets import Dataset
from penstock.controller.runs import RunFiles, RunKind
from penstock.errors import ConfigError, ControllerError, DatasetError, Issue, combine_issues
from penstock.sdk.dataset import count_rows
from penstock.system.files import replacing
from penstock.workspace.experiment import read_experiment, to_tables
from penstock.workspace.layout import ROLLOUTS, Workspace
from penstock.workspace.sections import VARIABLE, SecretsTable, StrictSection

WHERE = "the submission"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSubmission:
    """A run to be queued. The author's code was not loaded yet."""

    name: str
    """The requested name; the queue may add a number."""
    config: RunConfig
    """With absolute paths."""
    tables: dict[str, Any]
    """The submitted tables."""
    rollout: str
    entrypoint: str
    model: str
    dataset: str
    digest: str
    """SHA-256 of the dataset file."""
    env: dict[str, str]
    secrets: tuple[str, ...]
    project: Path
    """Folder that may hold a pyproject.toml."""


class SubmissionEnvironment(StrictSection):
    """Keys of a submission beside `run_config`."""

    env_config: dict[str, str] = Field(default_factory=dict[str, str])
    secrets: SecretsTable = SecretsTable()


def resolve_submission(
    controller: Controller, kind: RunKind, body: Mapping[str, Any], files: RunFiles, *, person: str
) -> ResolvedSubmission:
    """Resolves `body`, of `person`, with the code unpacked at `files.code`; ConfigError lists all problems."""
    if ("experiment_config" in body) == ("run_config" in body):
        raise ConfigError(f"{WHERE} needs one of experiment_config and run_config")
    name = body.get("name")
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise combine_issues(WHERE, [Issue("name", "name is no text; write what the run is to be called, or leave it out")])
    resolve = _resolve_experiment if "experiment_config" in body else _resolve_run_config
    resolved = resolve(controller, kind, body, files, person=person)
    return replace(resolved, name=name) if name else resolved


def _resolve_experiment(
    controller: Controller, kind: RunKind, body: Mapping[str, Any], files: RunFiles, *, person: str
) -> ResolvedSubmission:
    experiment = read_experiment(to_tables(body), kind, WHERE)
    tasks = _named_dataset(controller, experiment.dataset, files, is_own="snapshot" in body)
    model = controller.deployments.resolve(experiment.model_path)
    tree = experiment.run_config(code=files.code, dataset=tasks.path, rows=tasks.rows, model=model)
    config = make_config(tree, WHERE)
    return ResolvedSubmission(
        name=experiment.rollout,
        config=config,
        tables=experiment.tables,
        rollout=experiment.rollout,
        entrypoint=experiment.entrypoint,
        model=experiment.model_path,
        dataset=tasks.name,
        digest=tasks.digest,
        env=experiment.env,
        secrets=_secrets(controller, experiment.secrets, config, person),
        project=files.code / ROLLOUTS / experiment.rollout,
    )


def _resolve_run_config(
    controller: Controller, kind: RunKind, body: Mapping[str, Any], files: RunFiles, *, person: str
) -> ResolvedSubmission:
    tables, file = _run_config(body)
    extras = validate(
        SubmissionEnvironment, {key: body[key] for key in ("env_config", "secrets") if body.get(key) is not None}, WHERE
    )
    _check_variables(extras.env_config)
    base, submitted = (files.code / file).parent, make_config(tables, file)
    named = submitted.dataset.eval if kind == "eval" and submitted.dataset.eval else submitted.dataset.train
    config = _with_absolute_paths(controller, submitted, base, files)
    tasks = config.dataset.eval if kind == "eval" and config.dataset.eval else config.dataset.train
    return ResolvedSubmission(
        name=config.run.name,
        config=config,
        tables=tables,
        rollout=submitted.run.name,
        entrypoint=submitted.agent.entry.as_posix(),
        model=submitted.model.name,
        dataset=named.name,
        digest=_file_digest(tasks),
        env=extras.env_config,
        secrets=_secrets(controller, extras.secrets.required, config, person),
        project=base,
    )


def _run_config(body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    value: Any = body["run_config"]
    tables, file = (value.get("tables"), value.get("file", "penstock.toml")) if isinstance(value, dict) else (None, None)  # pyright: ignore
    if not isinstance(tables, dict) or not isinstance(file, str) or not is_inside_snapshot(file):
        raise ConfigError(f"{WHERE}: run_config needs `tables`, those of a run's file, and `file`, its path in the snapshot")
    return cast("dict[str, Any]", tables), file


def _with_absolute_paths(controller: Controller, config: RunConfig, base: Path, files: RunFiles) -> RunConfig:
    """Returns the config with absolute paths, and with the controller's datasets and models in place of their names."""
    issues: list[Issue] = []

    def code_path(key: str, path: Path) -> Path:
        found = Path(os.path.normpath(base / path))
        if not found.is_relative_to(files.code):
            text = f"{key} = {str(path)!r} is not in the submitted folder; put it there, and name it from {base.name}/"
            issues.append(Issue(key, text))
        return found

    def dataset_path(key: str, path: Path) -> Path:
        if (base / path).exists() or (known := _find_dataset(controller, path.name)) is None:
            return code_path(key, path)
        return _link_dataset(known, files)

    agent, dataset = config.agent, config.dataset
    entry, folder = code_path("agent.entry", agent.entry), code_path("agent.folder", agent.folder)
    flows = agent.flows and code_path("agent.flows", agent.flows)
    train, heldout = dataset_path("dataset.train", dataset.train), dataset.eval and dataset_path("dataset.eval", dataset.eval)
    if issues:
        raise combine_issues(WHERE, issues)
    model = config.model.name if config.engine.text_only else _model(controller, config.model.name, [base, files.code])
    return config.model_copy(
        update={
            "agent": agent.model_copy(update={"entry": entry, "folder": folder, "flows": flows}),
            "dataset": dataset.model_copy(update={"train": train, "eval": heldout}),
            "model": config.model.model_copy(update={"name": model}),
        }
    )


def _model(controller: Controller, name: str, folders: Iterable[Path]) -> str:
    """Returns the controller's checkpoint of this name, else a submitted path, else the name itself."""
    local = next((path for folder in folders if (path := folder / name).exists()), None)
    return controller.deployments.resolve(name) or (str(local.resolve()) if local else name)


class ResolvedDataset(NamedTuple):
    """A dataset as one run uses it."""

    name: str
    path: Path
    digest: str
    rows: int


def _named_dataset(controller: Controller, name: str, files: RunFiles, *, is_own: bool) -> ResolvedDataset:
    """Returns the controller's dataset of this name, else the submitted workspace's file; ConfigError if both exist and differ."""
    known = _find_dataset(controller, name)
    try:
        file = Workspace(files.code).dataset(name)
    except DatasetError:
        file = None
    if file is not None and not file.is_relative_to(files.code.resolve()):
        file = None
    if known is not None and file is not None and is_own and _file_digest(file) != known.digest:
        text = f"experiment.dataset = {name!r}: the uploaded dataset is not what {file.name} in the workspace holds now"
        raise combine_issues(
            WHERE, [Issue("experiment.dataset", f"{text}; upload it again (penstock dataset upload), or rename one of them")]
        )
    if known is not None:
        return ResolvedDataset(known.name, _link_dataset(known, files), str(known.digest), known.rows or count_rows(known.path))
    if file is None:
        text = f"experiment.dataset = {name!r}: no such dataset, neither uploaded nor as data/{name}.jsonl in the workspace"
        raise combine_issues(WHERE, [Issue("experiment.dataset", f"{text}; upload it with: penstock dataset upload FILE")])
    return ResolvedDataset(name, file, _file_digest(file), count_rows(file))


def _find_dataset(controller: Controller, name: str) -> Dataset | None:
    try:
        found = controller.datasets.get(name)
    except ControllerError as error:
        if error.status == 404:
            return None
        raise
    if found.digest is None:
        text = f"dataset {name!r} has no content yet ({found.status}); wait for it, or upload it again"
        raise ControllerError(text, code="DATASET_NOT_READY", status=409)
    return found


def _link_dataset(dataset: Dataset, files: RunFiles) -> Path:
    """Hard-links the dataset into the run's folder, so that it stays there if the dataset is replaced or deleted."""
    link = files.tasks / f"{dataset.digest}.{dataset.extension}"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        try:
            os.link(dataset.path, link)
        except OSError:  # another file system
            with replacing(link) as draft:
                shutil.copyfile(dataset.path, draft)
    return link


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as cause:
        raise DatasetError(f"{path.name}: the file of tasks cannot be read: {cause.strerror}; check its path") from cause


def _secrets(controller: Controller, names: Iterable[str], config: RunConfig, person: str) -> tuple[str, ...]:
    """Returns the required secrets, and the API keys that the config names if the controller has them for `person`."""
    keys = [value for value in _key_variables(config.model_dump(mode="json")) if _has_secret(controller, value, person)]
    return tuple(dict.fromkeys([*names, *keys]))


def _key_variables(tree: Any) -> Iterator[str]:
    """Yields the values of all `*api_key_env` settings: names of variables that hold an API key."""
    if isinstance(tree, Mapping):
        for key, value in cast("Mapping[str, Any]", tree).items():
            if key.endswith("api_key_env") and isinstance(value, str) and value:
                yield value
            yield from _key_variables(value)


def _has_secret(controller: Controller, name: str, person: str) -> bool:
    try:
        return bool(controller.vault.scopes([name], person=person))
    except ControllerError:
        return False


def _check_variables(env: Mapping[str, str]) -> None:
    if wrong := [name for name in env if not VARIABLE.fullmatch(name)]:
        raise combine_issues(
            WHERE, [Issue(f"env.{name}", f"{name!r} is no name of a variable; use A-Z, 0-9 and _") for name in wrong]
        )


def is_inside_snapshot(path: str) -> bool:
    """Whether a relative path stays inside the snapshot."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path
