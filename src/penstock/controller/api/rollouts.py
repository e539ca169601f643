"""Rollouts over HTTP: the folders under `rollouts/` of the repository that a caller works in."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.controller.api.links import Links
from penstock.controller.api.pages import page_reply, paged
from penstock.controller.repositories import Listing
from penstock.controller.stations import Controller
from penstock.errors import ControllerError

HEADER = "x-osmosis-git"


def routes(controller: Controller, links: Links) -> list[Route]:
    """Where what is."""

    async def listed(request: Request) -> Response:
        limit, offset = paged(request)
        name = request.headers.get(HEADER, "").strip().lower()
        if not name:
            text = "the request names no repository; run the command inside a workspace whose origin is registered here"
            raise ControllerError(text, code="REPOSITORY_REQUIRED", status=400, details={"field": HEADER})
        branch = request.query_params.get("branch") or None
        found = await asyncio.to_thread(controller.repositories.rollouts, name, branch=branch)
        repository = controller.repositories.find(name)
        rows = [_record(rollout, repository.name, found, repository.created_at) for rollout in found.names[offset : offset + limit]]
        return page_reply("rollouts", rows, len(found.names), limit, offset, more={"branch": branch})

    return [Route("/api/cli/rollouts", listed, methods=["GET"])]


def _record(rollout: str, repository: str, listing: Listing, created_at: str) -> dict[str, Any]:
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
