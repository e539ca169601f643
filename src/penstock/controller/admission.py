"""Admission of a submission: unpack, resolve, validate, write the run's files, queue it. A refused one leaves nothing behind."""

import asyncio
import errno
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import orjson

from penstock.config import RunConfig
from penstock.controller.context import Controller
from penstock.controller.environments import missing_requirements, requirements
from penstock.controller.identity import OWNER, THE_OWNER, Identity
from penstock.controller.isolation import is_checkpoint
from penstock.controller.jobs import RunJob
from penstock.controller.monitor import job_isolation
from penstock.controller.resolve import ResolvedSubmission, resolve_submission
from penstock.controller.runs import Run, RunFiles, RunKind, Submission, new_id
from penstock.controller.snapshots import unpack
from penstock.controller.validation_process import validate_submission
from penstock.errors import ControllerError, ModelError
from penstock.models import find_cached
from penstock.sdk.dataset import check_tasks
from penstock.system.files import write_file

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
    with suppress(ModelError):  # validation tells what is wrong with it
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
