"""The controller's HTTP app: all routes behind access control, error responses, and the server."""

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
from penstock.errors import ConfigError, ControllerError, DatasetError, ModelError, PenstockError, PoolError, RequestError
from penstock.http.asgi import header, host_name
from penstock.http.listen import base_url as url_of
from penstock.http.listen import bind, known_names
from penstock.http.server import HttpServer
from penstock.view.app import ViewApp
from penstock_controller.api import datasets, models, outputs, repositories, runs, secrets
from penstock_controller.api.auth import ROUTE_ACCESS, AccessLevel, AccountRoutes, ApiTokens, DeviceLogins
from penstock_controller.api.bodies import reply
from penstock_controller.api.links import CALLER_BASE_URL, PATH, SignedLinks
from penstock_controller.api.repositories import require_scope
from penstock_controller.api.results import RunResults
from penstock_controller.api.runs import SubmittedRuns
from penstock_controller.context import Controller
from penstock_controller.identity import GIT_HEADER, require_owner
from penstock_controller.isolation import describe_isolation

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
RETRY_AFTER = {429: "30", 503: "10"}
"""Retry-After header, in seconds, by status."""
DRAIN_S = 2.0
"""For clients to read responses after the controller was stopped."""
CLIENT_STALL_S = 60.0
"""A client that reads nothing for this long is disconnected."""
Endpoint = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)


def make_app(controller: Controller, base_url: str, *, names: Collection[str] | None = None) -> Starlette:
    """Builds the app. `names` are the accepted host names; None accepts any. Links use `base_url` if that is https."""
    tokens = ApiTokens(controller.database, controller.home.token())
    links = SignedLinks(controller.home.key("links"), base_url)
    results = RunResults(controller)
    account = AccountRoutes(tokens, DeviceLogins(controller.database, tokens), links, describe_isolation(controller.sandbox))
    unprotected = [Route("/health", _health, methods=["GET"]), *account.routes()]
    unprotected += [*runs.routes(controller, results), *outputs.routes(controller, links, results)]
    routers = (
        runs.snapshot_routes,
        repositories.rollout_routes,
        datasets.routes,
        models.routes,
        secrets.routes,
        repositories.routes,
    )
    unprotected += [route for routes in routers for route in routes(controller, links)]
    unprotected += ViewApp(SubmittedRuns(controller.runs, controller.home)).routes("/view")
    access = AccessControl(tokens, links)
    protected = [access.protect(route) for route in unprotected]
    app = Starlette(routes=protected, exception_handlers={HTTPException: routing_error_response})
    app.router.redirect_slashes = False
    app.add_middleware(HostCheck, names=None if names is None else frozenset(names))
    return app


async def _health(request: Request) -> Response:
    return reply({"status": "ok", "service": "penstock controller", "version": __version__})


class HostCheck:
    """Middleware: refuses unknown host names (DNS rebinding), and routes by the raw path, so that `%2F` stays in its segment."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = header(scope["headers"], b"host")
        if self._names is not None and host_name(host) not in self._names:
            text = f"this controller is not called {host_name(host)!r}; start it with that name among --name if it is yours"
            await error_response(RequestError(text, status=421, code="WRONG_HOST"))(scope, receive, send)
            return
        CALLER_BASE_URL.set(f"http://{host}" if host else "")  # links lead to where this caller reaches us
        raw = scope.get("raw_path") or scope["path"].encode()
        await self._app({**scope, "path": raw.decode("latin-1")}, receive, send)


class AccessControl:
    """Wraps every route with its access check and with error responses."""

    def __init__(self, tokens: ApiTokens, links: SignedLinks) -> None:
        self._tokens = tokens
        self._links = links

    def protect(self, route: Route) -> Route:
        """Returns the route with access check and error responses."""
        (method,) = (route.methods or set()) - {"HEAD"}
        level = ROUTE_ACCESS[f"{method} {route.path}"]
        endpoint: Endpoint = route.endpoint

        async def protected(request: Request) -> Response:
            try:
                request.scope["path_params"] = {name: unquote(value) for name, value in request.path_params.items()}
                await asyncio.to_thread(self._authorize, level, request)
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                return error_response(error)

        return Route(route.path, protected, methods=[method], name=level)

    def _authorize(self, level: AccessLevel, request: Request) -> None:
        if level is AccessLevel.LINK:
            purpose, _, token = request.url.path.removeprefix(f"{PATH}/").partition("/")
            request.state.link = self._links.read(purpose, token)
        elif level is not AccessLevel.NOTHING:
            request.state.who = self._tokens.identify(request.headers.get("authorization"))
            if level is AccessLevel.OWNER:
                require_owner(request.state.who)
            require_scope(request.url.path, request.headers.get(GIT_HEADER, ""))


# Error responses.


def error_response(error: Exception) -> Response:
    """Returns an error as JSON: code, message and all issues. An unexpected error is logged; its text is not sent."""
    known = _as_controller_error(error)
    if known is None:
        log.error("a request failed", exc_info=error)
        known = ControllerError("the controller failed on this request; its log says how", code="INTERNAL", status=500)
    status = known.status or 500
    headers = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    headers |= {"www-authenticate": "Bearer"} if status == 401 else {}
    return reply({**known.details, "error": str(known), "code": known.code}, status, **headers)


async def routing_error_response(request: Request, error: Exception) -> Response:
    """Returns the response for an unknown path or method."""
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


# The server.


@asynccontextmanager
async def serve_controller(
    controller: Controller, *, host: str = "127.0.0.1", port: int = 0, base_url: str = "", names: Collection[str] = ()
) -> AsyncGenerator[str]:
    """Serves the API; yields its URL for clients on this machine.

    `base_url` is how clients reach it if that differs, such as https://… of a proxy. `names` are further host names to accept. On
    an external interface without `names`, every host name is accepted: the token protects the API.
    """
    external = urlsplit(base_url).hostname if base_url.startswith(("http://", "https://")) else None
    if base_url and not external:
        raise ConfigError(f"base URL {base_url!r}: write it as https://name, or http://name:port")
    with _bind(host, port) as bound:
        local_url = url_of(host, bound.getsockname()[1]).removesuffix("/v1")
        known = known_names(host, [*names, external] if external else names)
        app = make_app(controller, base_url or local_url, names=known)
        async with HttpServer(app, bound, drain_s=DRAIN_S, reader_s=CLIENT_STALL_S):
            yield local_url


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except ConfigError as error:
        why = f"the controller cannot listen on {host}:{port}: {error.__cause__}"
        raise ConfigError(f"{why}; choose another port, or 0 for a free one") from error
