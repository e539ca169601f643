"""Routes for runs: submission with its code, lists, details, stop, metrics, logs and checkpoints; upload of snapshots."""

import asyncio
import re
import secrets
import shutil
from collections.abc import AsyncIterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.config import RunKind
from penstock.errors import ControllerError
from penstock.system.files import replacing
from penstock.view.run_files import is_run
from penstock.view.sources import MAX_RUNS, RunPlace, unknown_run
from penstock_controller.admission import CodeOrigin, admit
from penstock_controller.api.bodies import as_object, page_reply, page_request, read_object, reply, too_large
from penstock_controller.api.links import SignedLinks
from penstock_controller.api.logs import log_page, log_query
from penstock_controller.api.repositories import repository_of
from penstock_controller.api.results import (
    RunResults,
    accepted,
    eval_detail,
    eval_row,
    planned_steps,
    run_settings,
    training_detail,
    training_row,
)
from penstock_controller.checkpoints import checkpoints_of
from penstock_controller.context import Controller
from penstock_controller.home import Home
from penstock_controller.identity import Identity, require_own
from penstock_controller.runs import Run, RunFiles, RunQueue
from penstock_controller.snapshots import snapshot_commit

PATHS: Mapping[RunKind, str] = {"eval": "/api/cli/eval-runs", "train": "/api/cli/training-runs"}
KEYS: Mapping[RunKind, str] = {"eval": "eval_runs", "train": "training_runs"}
DIGEST = re.compile(r"[0-9a-f]{64}")


def routes(controller: Controller, results: RunResults) -> list[Route]:
    both = [route for kind in PATHS for route in RunRoutes(controller, results, kind).routes()]
    return [
        *both,
        Route(f"{PATHS['train']}/{{ref}}/checkpoints", RunRoutes(controller, results, "train").checkpoints, methods=["GET"]),
    ]


class RunRoutes:
    def __init__(self, controller: Controller, results: RunResults, kind: RunKind) -> None:
        self._controller = controller
        self._results = results
        self._kind: RunKind = kind

    def routes(self) -> list[Route]:
        path = PATHS[self._kind]
        return [
            Route(path, self._list, methods=["GET"]),
            Route(path, self._submit, methods=["POST"]),
            Route(f"{path}/{{ref}}", self._detail, methods=["GET"]),
            Route(f"{path}/{{ref}}/stop", self._stop, methods=["POST"]),
            Route(f"{path}/{{ref}}/metrics", self._metrics, methods=["GET"]),
            Route(f"{path}/{{ref}}/logs", self._logs, methods=["GET"]),
        ]

    async def _list(self, request: Request) -> Response:
        limit, offset = page_request(request)
        found, total = await asyncio.to_thread(self._controller.runs.page, self._kind, limit=limit, offset=offset)
        return page_reply(KEYS[self._kind], [await self._row(run) for run in found], total, limit, offset)

    async def _row(self, run: Run) -> dict[str, Any]:
        files = self._results.files(run)
        if self._kind == "eval":
            return eval_row(run, await self._results.results(run), run_settings(files))
        return training_row(run, await self._results.training(run), planned_steps(files))

    async def _detail(self, request: Request) -> Response:
        run = await self._run(request)
        chosen = run_settings(self._results.files(run))
        if self._kind == "eval":
            return reply(eval_detail(run, await self._results.results(run), chosen))
        steps = planned_steps(self._results.files(run))
        return reply(training_detail(run, await self._results.training(run), steps, chosen))

    async def _submit(self, request: Request) -> Response:
        body = await read_object(request)
        run = await submit(self._controller, self._kind, body, git=repository_of(request), who=request.state.who)
        return reply(accepted(run), 201)

    async def _stop(self, request: Request) -> Response:
        run = await self._run(request)
        require_own(request.state.who, run.submission.person, run.name)
        if not await asyncio.to_thread(self._controller.supervisor.stop, run):
            text = f"{run.name} is over already: {run.status}"
            raise ControllerError(text, code="RUN_OVER", status=409, details={"status": run.status})
        return reply(accepted(await self._run(request)))

    async def _metrics(self, request: Request) -> Response:
        run = await self._run(request)
        found = self._results.evaluation_metrics(run) if self._kind == "eval" else self._results.training_metrics(run)
        return reply(await found)

    async def _logs(self, request: Request) -> Response:
        run = await self._run(request)
        query = log_query(request, run.id)
        return reply(await asyncio.to_thread(log_page, self._results.files(run).log, run.id, query))

    async def checkpoints(self, request: Request) -> Response:
        run = await self._run(request)
        found = await asyncio.to_thread(checkpoints_of, run, self._results.files(run).results(run))
        checkpoints = [
            {
                "id": f"{run.id}-{each.step}",
                "checkpoint_name": each.name,
                "checkpoint_step": each.step,
                "status": "ready",
                "created_at": each.created_at,
                "reward": each.reward,
            }
            for each in reversed(found)
        ]
        return reply({"training_run_id": run.id, "training_run_name": run.name, "checkpoints": checkpoints})

    async def _run(self, request: Request) -> Run:
        return await asyncio.to_thread(self._controller.runs.get, self._kind, request.path_params["ref"])


# Submission.


async def submit(controller: Controller, kind: RunKind, body: Mapping[str, Any], *, git: str | None, who: Identity) -> Run:
    """Queues a run with the code of the body's `snapshot`, else of the repository that `git` names."""
    if "snapshot" in body:
        origin = _client_origin(body.get("origin"), git, who)
        return await admit(controller, kind, body, snapshot=_uploaded_snapshot(controller, body["snapshot"]), origin=origin)
    snapshot, origin = await asyncio.to_thread(_repository_snapshot, controller, body, git, who)
    return await admit(controller, kind, body, snapshot=snapshot, origin=origin)


def _uploaded_snapshot(controller: Controller, digest: object) -> Path:
    path = snapshot_path(controller, digest)
    if not path.is_file():
        text = f"this controller has no snapshot {digest}; upload it first: PUT /api/cli/snapshots/{digest}"
        raise ControllerError(text, code="SNAPSHOT_UNKNOWN", status=404, details={"field": "snapshot"})
    return path


def _client_origin(origin: object, git: str | None, who: Identity) -> CodeOrigin:
    """Returns the origin as the client states it: its code may differ from every commit."""
    fields = as_object(origin)
    branch, commit = fields.get("branch"), fields.get("commit_sha")
    return CodeOrigin(
        repository=git or "",
        branch=branch if isinstance(branch, str) else None,
        commit_sha=commit if isinstance(commit, str) else None,
        dirty=fields.get("dirty") is True,
        creator=who,
    )


def _repository_snapshot(
    controller: Controller, body: Mapping[str, Any], git: str | None, who: Identity
) -> tuple[Path, CodeOrigin]:
    """Packs HEAD, or the branch or commit that the body pins. Waits for git: call it in a thread."""
    if not git:
        text = "the submission brings no code: send X-Osmosis-Git: owner/name of a registered repository, or a snapshot"
        raise ControllerError(text, code="CODE_MISSING", status=400, details={"field": "snapshot"})
    experiment = as_object(body.get("experiment_config"))
    pins = [pin for key in ("commit_sha", "branch") if isinstance(pin := experiment.get(key), str) and pin]
    branch = experiment.get("branch")
    with snapshot_commit(controller.repositories.get(git), pins[0] if pins else None) as packed:
        path = snapshot_path(controller, packed.digest)
        if not path.exists():
            with replacing(path) as draft:
                shutil.copyfile(packed.path, draft)
    origin = CodeOrigin(
        repository=git.lower(),
        branch=branch if isinstance(branch, str) else packed.branch,
        commit_sha=packed.commit_sha,
        dirty=packed.dirty,
        creator=who,
    )
    return path, origin


# Snapshots.


def snapshot_routes(controller: Controller, links: SignedLinks) -> list[Route]:
    max_bytes = controller.limits.snapshot_mb * 1_000_000

    async def put(request: Request) -> Response:
        """Stores an archive: 201, or 200 if it exists. Keeps nothing if its SHA-256 differs from its name."""
        digest: str = request.path_params["digest"]
        path = snapshot_path(controller, digest)
        known = path.exists()
        draft = path.with_name(f".{digest}.{secrets.token_hex(4)}")
        try:
            found = await _receive(request.stream(), None if known else draft, max_bytes)
            if found != digest:
                text = f"the archive's SHA-256 is {found}, not {digest}; it was changed on the way: send it again"
                raise ControllerError(text, code="SNAPSHOT_MISMATCH", status=400)
            if not known:
                await asyncio.to_thread(draft.replace, path)
        finally:
            await asyncio.to_thread(draft.unlink, missing_ok=True)
        return reply({"snapshot": digest, "size": path.stat().st_size}, 200 if known else 201)

    return [Route("/api/cli/snapshots/{digest}", put, methods=["PUT"])]


def snapshot_path(controller: Controller, digest: object) -> Path:
    """Returns the path of the archive with this SHA-256, which need not exist; ControllerError 400 if it is no SHA-256."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        text = "snapshot must be the SHA-256 of an archive: 64 hexadecimal digits in lower case"
        raise ControllerError(text, code="SNAPSHOT_INVALID", status=400, details={"field": "snapshot"})
    return controller.home.snapshots / f"{digest}.tar.gz"


async def _receive(stream: AsyncIterable[bytes], draft: Path | None, max_bytes: int) -> str:
    """Writes a stream to `draft`, if given; returns its SHA-256."""
    digest, size = sha256(), 0
    out = None if draft is None else await asyncio.to_thread(draft.open, "wb")
    try:
        async for part in stream:
            size += len(part)
            if size > max_bytes:
                raise too_large(max_bytes)
            digest.update(part)
            if out is not None:
                await asyncio.to_thread(out.write, part)
    finally:
        if out is not None:
            out.close()
    return digest.hexdigest()


class SubmittedRuns:
    """The newest runs that have started, whoever submitted them: each token sees them in the API too."""

    def __init__(self, queue: RunQueue, home: Home) -> None:
        self._queue, self._home = queue, home

    def places(self) -> list[RunPlace]:
        kinds: tuple[RunKind, ...] = get_args(RunKind)
        found = [run for kind in kinds for run in self._queue.page(kind, limit=MAX_RUNS // 2, offset=0)[0]]
        return [place for run in found if is_run((place := self._place(run)).path)]

    def find(self, run_id: str) -> RunPlace:
        kinds: tuple[RunKind, ...] = get_args(RunKind)
        for kind in kinds:
            try:
                place = self._place(self._queue.get(kind, run_id))
            except ControllerError:
                continue
            if place.id == run_id and is_run(place.path):
                return place
        raise unknown_run(run_id)

    def _place(self, run: Run) -> RunPlace:
        folder = RunFiles(self._home.runs / run.id).results(run)
        return RunPlace(run.id, folder, {"name": run.name, "status": str(run.status)}, is_ours=False)
