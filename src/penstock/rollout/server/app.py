"""The rollout server as an ASGI app: who may ask, what is answered, and what happens when it starts and stops."""

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
from penstock.rollout.server.backend import ExecutionBackend
from penstock.rollout.server.journal import PLACE
from penstock.rollout.server.requests import AllowedHosts, InvalidBody, read_cancel, read_rollout
from penstock.rollout.server.rollouts import Limits, Rollouts

LARGEST = 64 << 20
"""Bytes of a request."""
RETRY_AFTER = {429: "5", 503: "10"}
"""Seconds after which a caller may try again."""
LAST_BYTES_S = 1.0
"""How long a stopped server lets callers take the answers that are written."""
READER_S = 60.0
"""How long a caller may take nothing of its answer before it is cut off."""
IN_PROCESS = "testclient"
"""What Starlette's test client calls itself; a server with a socket tells an address."""

Endpoint = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[Any]]


def create_rollout_server(
    *,
    backend: ExecutionBackend,
    lifespan: Lifespan | None = None,
    configure_logging: bool = True,
    token: str | None = None,
    hosts: Collection[str] | None = None,
    journal: Path | str | None = PLACE,
    max_accepted: int | None = None,
    limits: Limits | None = None,
) -> Starlette:
    """An app that runs rollouts on `backend`, for any ASGI server; its docs page is `docs/rollout-server.md`.

    `token` is what callers must show, by default $PENSTOCK_ROLLOUT_TOKEN; without any, only this machine is served. `hosts` may be
    called for models and callbacks, by default $PENSTOCK_ROLLOUT_HOSTS, else this machine's. What was accepted survives in the
    `journal`, a file; None keeps it in memory. `lifespan` is entered around all of it.
    """
    token = rollout_token() if token is None else token
    if token is not None and not token.strip():
        raise ConfigError("the rollout server's token is empty; give a long random one, or None to serve this machine alone")
    limits = limits or Limits()
    limits = limits if max_accepted is None else replace(limits, max_accepted=max_accepted)
    rollouts = Rollouts(backend, journal=None if journal is None else Path(journal), limits=limits)
    allowed = AllowedHosts(hosts) if hosts is not None else AllowedHosts(*[names] if (names := rollout_hosts()) else [])
    if configure_logging:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("penstock").setLevel(logging.INFO)

    @asynccontextmanager
    async def span(app: Starlette) -> AsyncGenerator[Any]:
        async with lifespan(app) if lifespan else nullcontext() as state:
            await rollouts.start()
            try:
                yield state
            finally:
                await rollouts.close()

    app = Starlette(routes=Desk(rollouts, allowed, token).routes(), lifespan=span, exception_handlers=HANDLERS)
    app.state.rollouts = rollouts
    return app


@asynccontextmanager
async def serving(app: Starlette, sock: socket.socket) -> AsyncGenerator[None]:
    """Serve the app on a bound socket; on leaving, rollouts are drained while their status can still be asked for."""
    from penstock.http.server import HttpServer  # loads uvicorn, which a command that refuses its input has no use for

    async with app.router.lifespan_context(app), HttpServer(app, sock, drain_s=LAST_BYTES_S, reader_s=READER_S):
        yield
        await app.state.rollouts.drain()


class Desk:
    """The answers to requests."""

    def __init__(self, rollouts: Rollouts, hosts: AllowedHosts, token: str | None) -> None:
        self._rollouts = rollouts
        self._hosts = hosts
        self._token = token

    def routes(self) -> list[Route]:
        """What is served where; all but the health needs to be let in."""
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/rollout", self._admitted(self._accept), methods=["POST"]),
            Route("/rollout/cancel", self._admitted(self._cancel), methods=["POST"]),
            Route("/rollout/{rollout_id}/status", self._admitted(self._status), methods=["GET"]),
        ]

    def _admitted(self, endpoint: Endpoint) -> Endpoint:
        async def admitted(request: Request) -> Response:
            admit(request, self._token)
            await self._rollouts.start()  # a server without lifespan events has not
            return await endpoint(request)

        return admitted

    async def _health(self, request: Request) -> Response:
        return _reply(self._rollouts.health(), 503 if self._rollouts.draining else 200)

    async def _accept(self, request: Request) -> Response:
        await self._rollouts.accept(await read_rollout(request, hosts=self._hosts, largest=LARGEST))
        return _reply({})

    async def _status(self, request: Request) -> Response:
        rollout_id: str = request.path_params["rollout_id"]
        state, message = await self._rollouts.standing(rollout_id)
        return _reply({"rollout_id": rollout_id, "status": state, "message": message or None})

    async def _cancel(self, request: Request) -> Response:
        wanted = await read_cancel(request, largest=LARGEST)
        return _reply({"cancelled": await self._rollouts.cancel(wanted.wanted())})


def admit(request: Request, token: str | None) -> None:
    """RequestError for a caller who may not ask: one without the token or, where there is none, one who is not on this machine."""
    if token is not None:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(shown.strip().encode("utf-8", "replace"), token.encode("utf-8", "replace"))
        if scheme.lower() != "bearer" or not right:
            what = "is not valid" if shown else "is missing"
            text = f"the rollout server's token {what}; send it as `Authorization: Bearer …`"
            raise RequestError(text, status=401, code="invalid_token")
        return
    relayed = {"forwarded", "x-forwarded-for", "origin"}.intersection(request.headers)
    if relayed or not _is_here(request.client.host if request.client else ""):
        who = f"a request with {relayed.pop()!r} may come from anywhere" if relayed else "the caller is on another machine"
        text = f"this server has no token, so that it serves its own machine only, and {who}"
        raise RequestError(f"{text}; start it with PENSTOCK_ROLLOUT_TOKEN set, and send that", status=403, code="forbidden")


def _is_here(host: str) -> bool:
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    return host == IN_PROCESS


def _reply(body: dict[str, Any], status: int = 200, **headers: str) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    """An error's status, a code, one line that says what is wrong, and each field of a body that was refused."""
    status = error.status if isinstance(error, RequestError) else 503
    code = error.code if isinstance(error, RequestError) else "not_recorded"
    detail: Any = str(error)
    if isinstance(error, InvalidBody):
        detail = [{"loc": ["body", *field.split(".")] if field else ["body"], "msg": msg} for field, msg in error.issues]
    after = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    asks = {"www-authenticate": "Bearer"} if status == 401 else {}
    return _reply({"error": {"code": code, "message": str(error)}, "detail": detail}, status, **after, **asks)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "GET /health, POST /rollout, POST /rollout/cancel, GET /rollout/{id}/status"
    code = {404: "no_such_route", 405: "wrong_method"}.get(error.status_code, "refused")
    message = f"{error.detail}; this server has {known}"
    return _reply({"error": {"code": code, "message": message}, "detail": message}, error.status_code, **error.headers or {})


HANDLERS: dict[Any, Any] = {PenstockError: _refuse, HTTPException: _no_route}
