"""A submission's code and where it came from, before admission looks at the rest."""

import asyncio
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.controller.admission import Origin, admit
from penstock.controller.api.auth import Identity
from penstock.controller.api.bodies import as_table
from penstock.controller.runs import Kind, Run
from penstock.controller.snapshots import of_commit
from penstock.controller.stations import Controller
from penstock.errors import ControllerError

DIGEST = re.compile(r"[0-9a-f]{64}")


async def submit(controller: Controller, kind: Kind, body: Mapping[str, Any], *, git: str | None, who: Identity) -> Run:
    """Queue a run of the code that the body brings as a `snapshot`, else of the repository that `git` names."""
    waiting = len(await asyncio.to_thread(controller.runs.waiting))
    if waiting >= controller.limits.queued:
        text = f"{waiting} runs wait already; wait for some to end, or stop some"
        raise ControllerError(text, code="QUEUE_FULL", status=429)
    if "snapshot" in body:
        origin = _told(body.get("origin"), git, who)
        return await admit(controller, kind, body, snapshot=_uploaded(controller, body["snapshot"]), origin=origin)
    snapshot, origin = await asyncio.to_thread(_of_repository, controller, body, git, who)
    return await admit(controller, kind, body, snapshot=snapshot, origin=origin)


def snapshot_path(controller: Controller, digest: object) -> Path:
    """Where code with this SHA-256 is, or would be, kept; ControllerError 400 where it is none."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        text = "snapshot must be the SHA-256 of an archive: 64 hexadecimal digits in lower case"
        raise ControllerError(text, code="SNAPSHOT_INVALID", status=400, details={"field": "snapshot"})
    return controller.home.snapshots / f"{digest}.tar.gz"


def _uploaded(controller: Controller, digest: object) -> Path:
    path = snapshot_path(controller, digest)
    if not path.is_file():
        text = f"this controller has no snapshot {digest}; upload it first: PUT /api/cli/snapshots/{digest}"
        raise ControllerError(text, code="SNAPSHOT_UNKNOWN", status=404, details={"field": "snapshot"})
    return path


def _told(origin: object, git: str | None, who: Identity) -> Origin:
    """As the client says: its code may differ from any commit."""
    told = as_table(origin)
    branch, commit = told.get("branch"), told.get("commit_sha")
    return Origin(
        repository=git or "",
        branch=branch if isinstance(branch, str) else None,
        commit_sha=commit if isinstance(commit, str) else None,
        dirty=told.get("dirty") is True,
        creator=who.name,
    )


def _of_repository(controller: Controller, body: Mapping[str, Any], git: str | None, who: Identity) -> tuple[Path, Origin]:
    """HEAD, or the branch or commit that the body pins. It waits for git, so it runs in a thread."""
    if not git:
        text = "the submission brings no code: send X-Osmosis-Git: owner/name of a registered repository, or a snapshot"
        raise ControllerError(text, code="CODE_MISSING", status=400, details={"field": "snapshot"})
    experiment = as_table(body.get("experiment_config"))
    pins = [pin for key in ("commit_sha", "branch") if isinstance(pin := experiment.get(key), str) and pin]
    branch = experiment.get("branch")
    with of_commit(controller.repositories.get(git), pins[0] if pins else None) as taken:
        path = snapshot_path(controller, taken.digest)
        if not path.exists():
            draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            shutil.copyfile(taken.path, draft)
            draft.replace(path)
    origin = Origin(
        repository=git.lower(),
        branch=branch if isinstance(branch, str) else taken.branch,
        commit_sha=taken.commit_sha,
        dirty=taken.dirty,
        creator=who.name,
    )
    return path, origin
