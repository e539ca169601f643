"""What a caller is told of an error: a status, a code, one line, and every issue where there are several. Never a traceback."""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import __version__
from penstock.controller.api import datasets, models, outputs, repositories, runs, secrets
from penstock.controller.api.auth import AccessLevel, AccountRoutes, ApiTokens, DeviceLogins, require_owner, required_access
from penstock.controller.api.bodies import reply
from penstock.controller.api.links import CALLER_BASE_URL, PATH, SignedLinks
from penstock.controller.api.results import RunResults
from penstock.controller.context import Controller
from penstock.errors import ConfigError, ControllerError, DatasetError, ModelError, PenstockError, PoolError, RequestError
from penstock.http.asgi import header
from penstock.http.listen import base_url as url_of
from penstock.http.listen import bind, known_names
from penstock.http.server import HttpServer

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
RETRY_AFTER = {429: "30", 503: "10"}
"""Seconds after which a caller may try again."""

log = logging.getLogger(__name__)


def error_response(error: Exception) -> Response:
    """What no one here expected is logged with its traceback, and told without."""
    known = _as_controller_error(error)
    if known is None:
        log.error("a request failed", exc_info=error)
        known = ControllerError("the controller failed on this request; its log says how", code="INTERNAL", status=500)
    status = known.status or 500
    headers = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    headers |= {"www-authenticate": "Bearer"} if status == 401 else {}
    return reply({**known.details, "error": str(known), "code": known.code}, status, **headers)


async def routing_error_response(request: Request, error: Exception) -> Response:
    """Of a path or a method that is not served."""
    assert isinstance(error, HTTPException)
    code = {404: "ROUTE_UNKNOWN", 405: "METHOD_NOT_ALLOWED"}.get(error.status_code, "REFUSED")
    text = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return reply({"error": text, "code": code}, error.status_code, **error.headers or {})


def _as_controller_error(error: Exception) -> ControllerError | None:
    if isinstance(error, ControllerError):
        return error
    if isinstance(error, ConfigError):
        return ControllerError(str(error), code=_code(error), status=400, details=_issues(error))
    if isinstance(error, RequestError):
        return ControllerError(str(error), code=error.code.upper(), status=error.status)
    if isinstance(error, PoolError) or (isinstance(error, OSError) and error.errno in DISK_FULL):
        text = str(error) if isinstance(error, PenstockError) else f"the controller cannot write: {error.strerror}; free disk space"
        return ControllerError(text, code="STORE_FAILED", status=503)
    return None


def _code(error: ConfigError) -> str:
    if isinstance(error, DatasetError):
        return "DATASET_INVALID"
    return "MODEL_INVALID" if isinstance(error, ModelError) else "CONFIG_INVALID"


def _issues(error: ConfigError) -> dict[str, Any]:
    if not error.issues:
        return {}
    issues = [{"key": issue.key, "message": issue.message, "key_correction": issue.correction} for issue in error.issues]
    return {"issues": issues, "field": error.issues[0].key}


Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(controller: Controller, base_url: str, *, names: Collection[str] | None = None) -> Starlette:
    """All routes. `names` are those that callers may know us by; None takes any. An https `base_url` is where links lead to."""
    tokens = ApiTokens(controller.database, controller.home.token())
    links = SignedLinks(controller.home.secret("links"), base_url)
    results = RunResults(controller)
    account = AccountRoutes(tokens, DeviceLogins(controller.database, tokens), links)
    listed = [Route("/health", _health, methods=["GET"]), *account.routes()]
    listed += [*runs.routes(controller, results), *outputs.routes(controller, links, results)]
    routers = (
        runs.snapshot_routes,
        repositories.rollout_routes,
        datasets.routes,
        models.routes,
        secrets.routes,
        repositories.routes,
    )
    listed += [route for routes in routers for route in routes(controller, links)]
    door = AccessControl(tokens, links)
    app = Starlette(routes=[door.guarded(route) for route in listed], exception_handlers={HTTPException: routing_error_response})
    app.router.redirect_slashes = False
    app.add_middleware(HostCheck, names=None if names is None else frozenset(names))
    return app


async def _health(request: Request) -> Response:
    return reply({"status": "ok", "service": "penstock controller", "version": __version__})


class HostCheck:
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
        if self._names is not None and _host_name(host) not in self._names:
            text = f"this controller is not called {_host_name(host)!r}; start it with that name among --name if it is yours"
            await error_response(RequestError(text, status=421, code="WRONG_HOST"))(scope, receive, send)
            return
        CALLER_BASE_URL.set(f"http://{host}" if host else "")
        raw = scope.get("raw_path") or scope["path"].encode()
        await self._app({**scope, "path": raw.decode("latin-1")}, receive, send)


class AccessControl:
    """What stands before the function of every route."""

    def __init__(self, tokens: ApiTokens, links: SignedLinks) -> None:
        self._tokens = tokens
        self._links = links

    def guarded(self, route: Route) -> Route:
        """The same route for those alone who may ask; whatever it raises is told in the platform's form."""
        (method,) = (route.methods or set()) - {"HEAD"}
        needed = required_access(method, route.path)
        endpoint: Endpoint = route.endpoint

        async def guarded(request: Request) -> Response:
            try:
                request.scope["path_params"] = {name: unquote(value) for name, value in request.path_params.items()}
                await asyncio.to_thread(self._admit, needed, request)
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                return error_response(error)

        return Route(route.path, guarded, methods=[method], name=needed)

    def _admit(self, needed: AccessLevel, request: Request) -> None:
        if needed is AccessLevel.LINK:
            what, _, token = request.url.path.removeprefix(f"{PATH}/").partition("/")
            request.state.link = self._links.read(what, token)
        elif needed is not AccessLevel.NOTHING:
            request.state.who = self._tokens.identify(request.headers.get("authorization"))
            if needed is AccessLevel.OWNER:
                require_owner(request.state.who)


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


DRAIN_S = 2.0
"""How long a stopped controller lets callers take the answers that are written."""
CLIENT_STALL_S = 60.0
"""How long a caller may take nothing of its answer before it is cut off."""


@asynccontextmanager
async def serve_controller(
    controller: Controller, *, host: str = "127.0.0.1", port: int = 0, base_url: str = "", names: Collection[str] = ()
) -> AsyncGenerator[str]:
    """Serve until this is left; yields the address for callers on this machine.

    `base_url` is how callers reach it where that is another, such as https://… of a proxy. `names` are further ones that it may be
    called by; on an interface other than this machine's own, without any, every name is taken: the token is what counts.
    """
    outside = urlsplit(base_url).hostname if base_url.startswith(("http://", "https://")) else None
    if base_url and not outside:
        raise ConfigError(f"base URL {base_url!r}: write it as https://name, or http://name:port")
    with _bind(host, port) as bound:
        here = url_of(host, bound.getsockname()[1]).removesuffix("/v1")
        known = known_names(host, [*names, outside] if outside else names)
        app = make_app(controller, base_url or here, names=known)
        async with HttpServer(app, bound, drain_s=DRAIN_S, reader_s=CLIENT_STALL_S):
            yield here


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except ConfigError as error:
        why = f"the controller cannot listen on {host}:{port}: {error.__cause__}"
        raise ConfigError(f"{why}; choose another port, or 0 for a free one") from error
