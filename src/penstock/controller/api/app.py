"""The controller as an ASGI app: who is let in, which station answers, and how a refusal looks."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import __version__
from penstock.controller.api import datasets, models, outputs, repositories, rollouts, runs, secrets, snapshots
from penstock.controller.api.account import Account
from penstock.controller.api.auth import Needs, Tokens, needs, refuse_others
from penstock.controller.api.bodies import reply
from penstock.controller.api.errors import no_route, refusal
from penstock.controller.api.links import PATH, REACHED, Links
from penstock.controller.api.logins import Logins
from penstock.controller.api.results import Results
from penstock.controller.stations import Controller
from penstock.errors import RequestError
from penstock.http.asgi import header

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(controller: Controller, base_url: str, *, names: Collection[str] | None = None) -> Starlette:
    """All routes. `names` are those that callers may know us by; None takes any. An https `base_url` is where links lead to."""
    tokens = Tokens(controller.database, controller.home.token())
    links = Links(controller.home.secret("links"), base_url)
    results = Results(controller)
    stations = (snapshots, repositories, datasets, models, secrets, rollouts)
    account = Account(tokens, Logins(controller.database, tokens), links)
    listed = [Route("/health", _health, methods=["GET"]), *account.routes()]
    listed += [*runs.routes(controller, results), *outputs.routes(controller, links, results)]
    listed += [route for station in stations for route in station.routes(controller, links)]
    door = Door(tokens, links)
    app = Starlette(routes=[door.guarded(route) for route in listed], exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False
    app.add_middleware(Gate, names=None if names is None else frozenset(names))
    return app


async def _health(request: Request) -> Response:
    return reply({"status": "ok", "service": "penstock controller", "version": __version__})


class Gate:
    """Before any route: refuses a web page that was tricked into calling us, and leaves each segment of a path as it was sent."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note by which name the caller knows us, too: its links are to lead there."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = header(scope["headers"], b"host")
        if self._names is not None and _name(host) not in self._names:
            text = f"this controller is not called {_name(host)!r}; start it with that name among --name if it is yours"
            await refusal(RequestError(text, status=421, code="WRONG_HOST"))(scope, receive, send)
            return
        REACHED.set(f"http://{host}" if host else "")
        raw = scope.get("raw_path") or scope["path"].encode()
        await self._app({**scope, "path": raw.decode("latin-1")}, receive, send)


class Door:
    """What stands before the function of every route."""

    def __init__(self, tokens: Tokens, links: Links) -> None:
        self._tokens = tokens
        self._links = links

    def guarded(self, route: Route) -> Route:
        """The same route for those alone who may ask; whatever it raises is told in the platform's form."""
        (method,) = (route.methods or set()) - {"HEAD"}
        needed = needs(method, route.path)
        endpoint: Endpoint = route.endpoint

        async def guarded(request: Request) -> Response:
            try:
                request.scope["path_params"] = {name: unquote(value) for name, value in request.path_params.items()}
                await asyncio.to_thread(self._admit, needed, request)
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                return refusal(error)

        return Route(route.path, guarded, methods=[method], name=needed)

    def _admit(self, needed: Needs, request: Request) -> None:
        if needed is Needs.LINK:
            what, _, token = request.url.path.removeprefix(f"{PATH}/").partition("/")
            request.state.link = self._links.read(what, token)
        elif needed is not Needs.NOTHING:
            request.state.who = self._tokens.identify(request.headers.get("authorization"))
            if needed is Needs.OWNER:
                refuse_others(request.state.who)


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
