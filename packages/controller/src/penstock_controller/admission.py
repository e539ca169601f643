"""Admission of a submission: unpack, resolve, validate, write the run's files, queue it. A refused one leaves nothing behind."""

import asyncio
import errno
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
from pydantic import Field

from penstock.config import RunConfig, RunKind, make_config, validate
from penstock.errors import ConfigError, ControllerError, DatasetError, Issue, ModelError, combine_issues
from penstock.models import find_cached
from penstock.sdk.dataset import check_tasks, count_rows
from penstock.system.files import replacing, write_file
from penstock_controller.context import Controller
from penstock_controller.datasets import Dataset
from penstock_controller.environments import missing_requirements, requirements
from penstock_controller.experiment import VARIABLE, SecretsTable, StrictSection, read_experiment, to_tables
from penstock_controller.identity import OWNER, THE_OWNER, Identity
from penstock_controller.isolation import is_checkpoint
from penstock_controller.monitor import job_isolation
from penstock_controller.runs import Run, RunFiles, RunJob, Submission, new_id
from penstock_controller.snapshots import unpack
from penstock_controller.validation_process import validate_submission
from penstock_controller.workspace import ROLLOUTS, Workspace

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
    """Keys of a submission besides `run_config`."""

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


COMMANDS = {"eval": ["eval", "run"], "train": ["train"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOrigin:
    """Where a submission's code came from, and who submitted it."""

    repository: str = ""
    """owner/name."""
    branch: str | None = None
    commit_sha: str | None = None
    dirty: bool = False
    """Whether the code differed from that commit."""
    creator: Identity = THE_OWNER


async def admit(controller: Controller, kind: RunKind, body: Mapping[str, Any], *, snapshot: Path, origin: CodeOrigin) -> Run:
    """Queues the run that `body` describes, with the code in the tar.gz `snapshot`.

    Raises ConfigError, DatasetError, ModelError or ControllerError if the submission is refused; then nothing has changed.
    """
    async with controller.admissions:
        run = await asyncio.to_thread(_admit, controller, kind, body, snapshot, origin)
    controller.supervisor.wake()
    return run


def _admit(controller: Controller, kind: RunKind, body: Mapping[str, Any], snapshot: Path, origin: CodeOrigin) -> Run:
    waiting = controller.runs.count_waiting()
    if waiting >= controller.limits.queued:
        text = f"{waiting} runs wait, as many as this controller takes; wait for one to begin, or stop one"
        raise ControllerError(text, code="QUEUE_FULL", status=429)
    run_id = new_id()
    files = RunFiles(controller.home.runs / run_id)
    try:
        files.path.mkdir(mode=0o700)
        unpack(snapshot, files.code, limit_mb=controller.limits.snapshot_mb)
        resolved = resolve_submission(controller, kind, body, files, person=origin.creator.person)
        scopes = controller.vault.scopes(resolved.secrets, person=origin.creator.person)
        _check(controller, kind, resolved, files, person=origin.creator.person)
        with snapshot.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        return _enqueue(controller, kind, run_id, files, resolved, _submission(resolved, digest, origin, scopes))
    except OSError as cause:
        shutil.rmtree(files.path, ignore_errors=True)
        is_full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the controller's disk is full" if is_full else f"the run cannot be laid out: {cause}"
        raise ControllerError(f"{why}; free some space there, then submit it again", code="STORE_FAILED", status=503) from cause
    except BaseException:
        shutil.rmtree(files.path, ignore_errors=True)
        raise


def _check(controller: Controller, kind: RunKind, resolved: ResolvedSubmission, files: RunFiles, *, person: str) -> None:
    """Validates the project; if its packages are installed only when it runs, only its datasets."""
    isolation = job_isolation(_job(controller, kind, resolved, files, trusted=person == OWNER), files)
    if isolation.sandbox.isolates and not isolation.trusted:
        _require_model(resolved.config)
    if missing_requirements(resolved.project):
        for tasks in (resolved.config.dataset.train, resolved.config.dataset.eval):
            if tasks is not None:
                check_tasks(tasks, columns=None)
        return
    tree, secrets = resolved.config.model_dump(mode="json"), controller.vault.values(resolved.secrets, person=person)
    validate_submission(tree, kind, code=files.code, env=resolved.env, secrets=secrets, isolation=isolation)


def _require_model(config: RunConfig) -> None:
    """Refuses a model that the run would have to pull: in the sandbox the cache of models cannot be changed."""
    name = config.model.name
    with suppress(ModelError):  # validation reports what is wrong with it
        if not config.engine.text_only and find_cached(name) is None:
            text = f"the model {name!r} is not on the controller's machine; there its owner can run: penstock model pull {name}"
            raise ControllerError(text, code="MODEL_NOT_PULLED", status=409, details={"field": "model.name"})


def _submission(resolved: ResolvedSubmission, digest: str, origin: CodeOrigin, scopes: dict[str, str]) -> Submission:
    return Submission(
        rollout=resolved.rollout,
        entrypoint=resolved.entrypoint,
        model=resolved.model,
        dataset=resolved.dataset,
        dataset_digest=resolved.digest,
        snapshot=digest,
        tables=resolved.tables,
        repository=origin.repository,
        branch=origin.branch,
        commit_sha=origin.commit_sha,
        dirty=origin.dirty,
        env=resolved.env,
        secrets=scopes,
        creator=origin.creator.label,
        person=origin.creator.person,
    )


def _enqueue(
    controller: Controller, kind: RunKind, run_id: str, files: RunFiles, resolved: ResolvedSubmission, submission: Submission
) -> Run:
    """Writes the files that the monitor needs, then queues the run, in one transaction so that its name stays unused."""
    with controller.database.transaction():
        name = controller.runs.free_name(kind, resolved.name)
        run = resolved.config.run.model_copy(update={"name": name, "folder": files.out})
        config = resolved.config.model_copy(update={"run": run})
        write_file(files.config, orjson.dumps(config.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
        _job(controller, kind, resolved, files, trusted=submission.person == OWNER).write(files)
        return controller.runs.add(kind, run_id, name, submission)


def _job(controller: Controller, kind: RunKind, resolved: ResolvedSubmission, files: RunFiles, *, trusted: bool) -> RunJob:
    model = Path(resolved.config.model.name)
    return RunJob(
        argv=[sys.executable, "-P", "-m", "penstock", *COMMANDS[kind], str(files.config)],
        cwd=str(files.code),
        env=resolved.env,
        project=str(resolved.project) if requirements(resolved.project) else "",
        environments=str(controller.home.environments),
        sandbox=controller.sandbox.name,
        trusted=trusted,
        checkpoint=str(model) if is_checkpoint(model, controller.home.runs) else "",
    )
