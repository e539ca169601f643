"""Repositories on the controller's machine that stand for an owner/name."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.controller.api.bodies import read_object, reply, text_of
from penstock.controller.api.links import Links
from penstock.controller.api.pages import page_reply, paged
from penstock.controller.repositories import Repository
from penstock.controller.stations import Controller


def routes(controller: Controller, links: Links) -> list[Route]:
    """To list them, and to add one."""

    async def listed(request: Request) -> Response:
        limit, offset = paged(request)
        found, total = await asyncio.to_thread(controller.repositories.page, limit=limit, offset=offset)
        return page_reply("repositories", [_view(each) for each in found], total, limit, offset)

    async def register(request: Request) -> Response:
        body = await read_object(request)
        name, path = text_of(body, "name"), Path(text_of(body, "path"))
        return reply(_view(await asyncio.to_thread(controller.repositories.register, name, path)), 201)

    return [
        Route("/api/cli/repositories", listed, methods=["GET"]),
        Route("/api/cli/repositories", register, methods=["POST"]),
    ]


def _view(repository: Repository) -> dict[str, Any]:
    return {"id": repository.name, "name": repository.name, "path": str(repository.path), "created_at": repository.created_at}
