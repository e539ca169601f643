"""The rollout server as an ASGI app: authorization, routes, errors, start and stop."""

import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.config import rollout_hosts, rollout_token
from penstock.errors import ConfigError, PenstockError, RequestError
from penstock.http.asgi import host_name
from penstock.http.listen import is_loopback
from penstock_compat.rollout_server.backend import ExecutionBackend
from penstock_compat.rollout_server.journal import DEFAULT_PATH
from penstock_compat.rollout_server.requests import AllowedHosts, InvalidBody, read_cancel, read_rollout
from penstock_compat.rollout_server.rollouts import AcceptedRollouts, ServerLimits

MAX_REQUEST_BYTES, MAX_CANCEL_BYTES = 16 << 20, 1 << 20
RETRY_AFTER = {429: "5", 503: "10"}
"""The Retry-After header, in seconds, by status."""
LAST_BYTES_S = 1.0
"""How long a stopping server waits for callers to read responses that are already written."""
READER_S = 60.0
"""How long a caller may read nothing of its response before the connection is closed."""
TEST_CLIENT = "testclient"
"""The address that Starlette's test client has; a real client has an IP address."""
TEST_SERVER = "testserver"
"""The host name that it asks for."""

Endpoint = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[Any]]


def create_rollout_server(
    *,
    backend: ExecutionBackend,
    lifespan: Lifespan | None = None,
    configure_logging: bool = True,
    token: str | None = None,
    hosts: Collection[str] | None = None,
    journal: Path | str | None = DEFAULT_PATH,
    max_accepted: int | None = None,
    limits: ServerLimits | None = None,
) -> Starlette:
    """Returns an app that runs rollouts on `backend`, for any ASGI server; see docs/environments.md.

    Callers must send `token`, by default $PENSTOCK_ROLLOUT_TOKEN; without one, only this machine is served. Models and callbacks
    may be on `hosts`, by default $PENSTOCK_ROLLOUT_HOSTS, else on this machine only. Accepted rollouts are kept in the file
    `journal`; None keeps them in memory. `lifespan` is entered around all of it.
    """
    token = rollout_token() if token is None else token
    if token is not None and not token.strip():
        raise ConfigError("the rollout server's token is empty; give a long random one, or None to serve this machine alone")
    limits = limits or ServerLimits()
    limits = limits if max_accepted is None else replace(limits, max_accepted=max_accepted)
    rollouts = AcceptedRollouts(backend, journal=None if journal is None else Path(journal), limits=limits)
    allowed = AllowedHosts(hosts) if hosts is not None else AllowedHosts(*[names] if (names := rollout_hosts()) else [])
    if configure_logging:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        for name in ("penstock", "penstock_compat"):
            logging.getLogger(name).setLevel(logging.INFO)

    @asynccontextmanager
    async def full_lifespan(app: Starlette) -> AsyncGenerator[Any]:
        async with lifespan(app) if lifespan else nullcontext() as state:
            await rollouts.start()
            try:
                yield state
            finally:
                await rollouts.close()

    app = Starlette(
        routes=RolloutRoutes(rollouts, allowed, token).routes(), lifespan=full_lifespan, exception_handlers=EXCEPTION_HANDLERS
    )
    app.state.rollouts = rollouts
    return app


@asynccontextmanager
async def serving(app: Starlette, sock: socket.socket) -> AsyncGenerator[None]:
    """Serves the app on a bound socket. On exit, rollouts are drained while the server still answers status requests."""
    from penstock.http.server import HttpServer  # loads uvicorn: not needed by a command that refuses its input

    async with app.router.lifespan_context(app), HttpServer(app, sock, drain_s=LAST_BYTES_S, reader_s=READER_S):
        yield
        await app.state.rollouts.drain()


class RolloutRoutes:
    """The server's endpoints."""

    def __init__(self, rollouts: AcceptedRollouts, hosts: AllowedHosts, token: str | None) -> None:
        self._rollouts = rollouts
        self._hosts = hosts
        self._token = token

    def routes(self) -> list[Route]:
        """Returns the routes; all but `/health` need authorization."""
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/rollout", self._authorized(self._accept), methods=["POST"]),
            Route("/rollout/cancel", self._authorized(self._cancel), methods=["POST"]),
            Route("/rollout/{rollout_id}/status", self._authorized(self._status), methods=["GET"]),
        ]

    def _authorized(self, endpoint: Endpoint) -> Endpoint:
        async def authorized(request: Request) -> Response:
            authorize(request, self._token)
            await self._rollouts.start()  # an ASGI server without lifespan events has not started them
            return await endpoint(request)

        return authorized

    async def _health(self, request: Request) -> Response:
        return _reply(self._rollouts.health(), 503 if self._rollouts.draining else 200)

    async def _accept(self, request: Request) -> Response:
        await self._rollouts.accept(await read_rollout(request, hosts=self._hosts, max_bytes=MAX_REQUEST_BYTES))
        return _reply({})

    async def _status(self, request: Request) -> Response:
        rollout_id: str = request.path_params["rollout_id"]
        state, message = await self._rollouts.status(rollout_id)
        return _reply({"rollout_id": rollout_id, "status": state, "message": message or None})

    async def _cancel(self, request: Request) -> Response:
        cancel = await read_cancel(request, max_bytes=MAX_CANCEL_BYTES)
        return _reply({"cancelled": await self._rollouts.cancel(cancel.matcher())})


def authorize(request: Request, token: str | None) -> None:
    """Raises RequestError for a caller without the token or, if the server has none, for a caller on another machine."""
    if token is not None:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        valid = hmac.compare_digest(sent.strip().encode("utf-8", "replace"), token.encode("utf-8", "replace"))
        if scheme.lower() != "bearer" or not valid:
            problem = "is not valid" if sent else "is missing"
            text = f"the rollout server's token {problem}; send it as `Authorization: Bearer …`"
            raise RequestError(text, status=401, code="invalid_token")
        return
    # Such a header shows that a proxy or a web page sent the request: the peer's address then says nothing about the caller.
    relayed = {"forwarded", "x-forwarded-for", "origin"}.intersection(request.headers)
    if relayed or not _is_loopback(request.client.host if request.client else ""):
        who = f"a request with {relayed.pop()!r} may come from anywhere" if relayed else "the caller is on another machine"
        text = f"this server has no token, so that it serves its own machine only, and {who}"
        raise RequestError(f"{text}; start it with PENSTOCK_ROLLOUT_TOKEN set, and send that", status=403, code="forbidden")
    host = request.headers.get("host")  # a web page can have its own name lead to this machine
    if host is not None and not _is_local_name(host_name(host)):
        text = f"this server has no token, so that it is called localhost or 127.0.0.1 only, not {host[:60]!r}"
        raise RequestError(f"{text}; start it with PENSTOCK_ROLLOUT_TOKEN set, and send that", status=421, code="wrong_host")


def _is_local_name(name: str) -> bool:
    return name.endswith(".localhost") or name == TEST_SERVER or is_loopback(name)


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    return host == TEST_CLIENT


def _reply(body: dict[str, Any], status: int = 200, **headers: str) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, RequestError) else 503
    code = error.code if isinstance(error, RequestError) else "not_recorded"
    detail: Any = str(error)
    if isinstance(error, InvalidBody):
        detail = [{"loc": ["body", *field.split(".")] if field else ["body"], "msg": msg} for field, msg in error.issues]
    retry = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    challenge = {"www-authenticate": "Bearer"} if status == 401 else {}
    return _reply({"error": {"code": code, "message": str(error)}, "detail": detail}, status, **retry, **challenge)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "GET /health, POST /rollout, POST /rollout/cancel, GET /rollout/{id}/status"
    code = {404: "no_such_route", 405: "wrong_method"}.get(error.status_code, "refused")
    message = f"{error.detail}; this server has {known}"
    return _reply({"error": {"code": code, "message": message}, "detail": message}, error.status_code, **error.headers or {})


EXCEPTION_HANDLERS: dict[Any, Any] = {PenstockError: _refuse, HTTPException: _no_route}
