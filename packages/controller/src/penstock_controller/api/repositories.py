"""Routes for repositories registered on the controller's machine, and for the rollouts in them."""

import asyncio
import re
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import ControllerError
from penstock_controller.api.bodies import page_reply, page_request, read_object, reply, string_field
from penstock_controller.api.links import SignedLinks
from penstock_controller.context import Controller
from penstock_controller.identity import GIT_HEADER, NO_REPOSITORY
from penstock_controller.repositories import Repository, RolloutListing


def routes(controller: Controller, links: SignedLinks) -> list[Route]:
    async def list_repositories(request: Request) -> Response:
        limit, offset = page_request(request)
        found, total = await asyncio.to_thread(controller.repositories.page, limit=limit, offset=offset)
        return page_reply("repositories", [_repository_record(each) for each in found], total, limit, offset)

    async def register(request: Request) -> Response:
        body = await read_object(request)
        name, path = string_field(body, "name"), Path(string_field(body, "path"))
        return reply(_repository_record(await asyncio.to_thread(controller.repositories.register, name, path)), 201)

    return [
        Route("/api/cli/repositories", list_repositories, methods=["GET"]),
        Route("/api/cli/repositories", register, methods=["POST"]),
    ]


def _repository_record(repository: Repository) -> dict[str, Any]:
    return {"id": repository.name, "name": repository.name, "path": str(repository.path), "created_at": repository.created_at}


_NAMES = ("datasets", "eval-runs", "training-runs", "rollouts", "models", "environment-secrets")
SCOPED = tuple(f"/api/cli/{name}" for name in _NAMES)
"""Routes whose requests name a workspace's repository, as the platform's contract says."""
REPOSITORY_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def require_scope(path: str, repository: str) -> None:
    """ControllerError 400 if a request to one of `SCOPED` does not name a repository, with the platform's codes."""
    if not path.startswith(SCOPED):
        return
    if not repository.strip():
        text = f"the request names no repository; send `{GIT_HEADER}: owner/name`, or run the command inside a workspace"
        raise ControllerError(text, code="GIT_SCOPE_HEADER_REQUIRED", status=400, details={"field": GIT_HEADER})
    if not REPOSITORY_NAME.fullmatch(repository.strip()):
        text = f"{repository[:200]!r} names no repository; send `{GIT_HEADER}: owner/name`"
        raise ControllerError(text, code="GIT_SCOPE_HEADER_INVALID", status=400, details={"field": GIT_HEADER})


def repository_of(request: Request) -> str | None:
    """Returns the repository that the request names; None from a folder without one."""
    name = request.headers.get(GIT_HEADER, "").strip()
    return name if name not in ("", NO_REPOSITORY) else None


def rollout_routes(controller: Controller, links: SignedLinks) -> list[Route]:
    async def list_rollouts(request: Request) -> Response:
        limit, offset = page_request(request)
        name = request.headers[GIT_HEADER].strip().lower()
        branch = request.query_params.get("branch") or None
        found = await asyncio.to_thread(controller.repositories.rollouts, name, branch=branch)
        repository = controller.repositories.find(name)
        names = found.names[offset : offset + limit]
        rows = [_rollout_record(rollout, repository.name, found, repository.created_at) for rollout in names]
        return page_reply("rollouts", rows, len(found.names), limit, offset, more={"branch": branch})

    return [Route("/api/cli/rollouts", list_rollouts, methods=["GET"])]


def _rollout_record(rollout: str, repository: str, listing: RolloutListing, created_at: str) -> dict[str, Any]:
    return {
        "id": f"{repository}/{rollout}",
        "name": rollout,
        "description": None,
        "is_active": True,
        "last_synced_at": listing.committed_at,
        "last_synced_commit_sha": listing.commit_sha,
        "repo_full_name": repository,
        "created_at": created_at,
    }
