"""Routes for repositories registered on the controller's machine, and for the rollouts in them."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.controller.api.bodies import page_reply, page_request, read_object, reply, string_field
from penstock.controller.api.links import SignedLinks
from penstock.controller.context import Controller
from penstock.controller.repositories import Repository, RolloutListing
from penstock.errors import ControllerError


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


HEADER = "x-osmosis-git"


def rollout_routes(controller: Controller, links: SignedLinks) -> list[Route]:
    async def list_rollouts(request: Request) -> Response:
        limit, offset = page_request(request)
        name = request.headers.get(HEADER, "").strip().lower()
        if not name:
            text = "the request names no repository; run the command inside a workspace whose origin is registered here"
            raise ControllerError(text, code="REPOSITORY_REQUIRED", status=400, details={"field": HEADER})
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
