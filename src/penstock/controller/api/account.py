"""Who one is, and how one gets in: `verify`, logins of devices, tokens."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.controller.api.auth import Identity, Tokens
from penstock.controller.api.bodies import read_object, reply, text_of
from penstock.controller.api.links import Links
from penstock.controller.api.logins import INTERVAL_S, LIFETIME_S, Logins, as_code


class Account:
    """Routes of who asks."""

    def __init__(self, tokens: Tokens, logins: Logins, links: Links) -> None:
        self._tokens = tokens
        self._links = links
        self._logins = logins

    def routes(self) -> list[Route]:
        """Where what is."""
        return [
            Route("/device", self._page, methods=["GET"]),
            Route("/api/cli/verify", self._verify, methods=["GET"]),
            Route("/api/cli/device/authorize", self._authorize, methods=["POST"]),
            Route("/api/cli/device/token", self._token, methods=["POST"]),
            Route("/api/cli/device/approve", self._approve, methods=["POST"]),
            Route("/api/cli/tokens/{token_id}", self._revoke, methods=["DELETE"]),
        ]

    async def _verify(self, request: Request) -> Response:
        who: Identity = request.state.who
        body = {"user": _user(who), "token_id": who.token_id}
        body |= {"expires_at": who.expires_at} if who.expires_at else {}
        git = request.headers.get("x-osmosis-git")
        role = "owner" if who.is_owner else "member"
        return reply(body | ({"workspace": {"id": git, "name": git, "role": role}} if git else {}))

    async def _authorize(self, request: Request) -> Response:
        body = await read_object(request)
        begun = self._logins.begin(text_of(body, "deviceName", default="a device")[:100])
        page = f"{self._links.base}/device"
        whole = {"verification_uri": page, "verification_uri_complete": f"{page}?code={begun.user_code}"}
        return reply(begun._asdict() | whole | {"expires_in": LIFETIME_S, "interval": INTERVAL_S})

    async def _page(self, request: Request) -> Response:
        """What the browser of who logs in shows: whom to ask."""
        code = as_code(request.query_params.get("code", "")) or "CODE"
        text = f"To let this device in, run on the controller's machine:\n\n    penstock controller approve {code}\n"
        return PlainTextResponse(text, headers={"cache-control": "no-store", "x-content-type-options": "nosniff"})

    async def _token(self, request: Request) -> Response:
        token, who = self._logins.token(text_of(await read_object(request), "device_code"))
        return reply({"token": token, "user": _user(who), "token_id": who.token_id, "expires_at": who.expires_at})

    async def _approve(self, request: Request) -> Response:
        body = await read_object(request)
        approve = body.get("deny") is not True
        name = self._logins.answer(text_of(body, "user_code"), approve=approve)
        return reply({"device_name": name, "status": "approved" if approve else "denied"})

    async def _revoke(self, request: Request) -> Response:
        self._tokens.revoke(request.path_params["token_id"], request.state.who)
        return reply({"id": request.path_params["token_id"], "status": "revoked"})


def _user(who: Identity) -> dict[str, str]:
    return {"id": who.token_id, "email": who.email, "name": who.name}
