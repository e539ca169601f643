"""Routes for secrets: one's own and the shared ones are listed, set and deleted. No route returns a value."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import ControllerError
from penstock_controller.api.bodies import page_reply, page_request, read_object, reply, string_field
from penstock_controller.api.links import SignedLinks
from penstock_controller.context import Controller
from penstock_controller.vault import Secret

PATH = "/api/cli/environment-secrets"


def routes(controller: Controller, links: SignedLinks) -> list[Route]:
    vault = controller.vault

    async def list_secrets(request: Request) -> Response:
        limit, offset = page_request(request)
        scope = request.query_params.get("scope", "all")
        found, total = await asyncio.to_thread(vault.page, scope, person=request.state.who.person, limit=limit, offset=offset)
        return page_reply("environment_secrets", [_record(each) for each in found], total, limit, offset)

    async def set_secret(request: Request) -> Response:
        body = await read_object(request)
        value = body.get("value")
        if not isinstance(value, str):  # not `string_field`: its errors might one day show the value
            raise ControllerError("value must be text", code="SECRET_INVALID", status=400, details={"field": "value"})
        name, scope = string_field(body, "name"), string_field(body, "scope", default="user")
        return reply(_record(await asyncio.to_thread(vault.set, name, value, scope, who=request.state.who)))

    async def delete_secret(request: Request) -> Response:
        body = await read_object(request)
        name, scope = string_field(body, "name"), string_field(body, "scope", default="user")
        await asyncio.to_thread(vault.delete, name, scope, who=request.state.who)
        return reply({"name": name, "scope": scope})

    return [
        Route(PATH, list_secrets, methods=["GET"]),
        Route(PATH, set_secret, methods=["POST"]),
        Route(PATH, delete_secret, methods=["DELETE"]),
    ]


def _record(secret: Secret) -> dict[str, Any]:
    return {
        "id": secret.id,
        "name": secret.name,
        "scope": secret.scope,
        "created_at": secret.created_at,
        "updated_at": secret.updated_at,
        "creator_name": secret.creator or None,
        "updater_name": secret.updater or None,
    }
