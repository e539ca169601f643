"""The gateway: every route with what it needs of its caller, and the server that they run on."""

import socket
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engines.base import Engine
from penstock.errors import ConfigError, PenstockError, RequestError
from penstock.events import Events
from penstock.gateway.auth import Needs, Tokens
from penstock.gateway.calls import Limits
from penstock.gateway.control import Control, reply
from penstock.gateway.dialects import DIALECTS
from penstock.gateway.dialects.base import Dialect
from penstock.gateway.dialects.chat import error_body
from penstock.gateway.endpoint import Line, ModelRoute, as_refusal
from penstock.gateway.serve import Service
from penstock.gateway.sessions import Session, Sessions
from penstock.pool.base import Pool
from penstock.records import Rollout, Sampling
from penstock.render.renderer import Renderer

Endpoint = Callable[[Request], Awaitable[Response]]

GRACE_S = 5
"""How long a stopping server waits for answers that are being sent."""


class Gateway:
    """Where agents send their calls. `async with` serves it on a socket; `app` is the same without one.

    `sampling` gives defaults by channel for rollouts that were opened by another process; `open` gives them otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        pool: Pool,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        events: Events | None = None,
        sampling: Mapping[str, Sampling] | None = None,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self.tokens = Tokens(secret)
        self._events = events or Events()
        self._address = (host, port)
        self._service = Service(engine, renderer, pool, self._events)
        base_url = f"http://{_reachable(host)}:{port}/v1"
        self._sessions = Sessions(pool, self.tokens, defaults=sampling or {}, limits=limits, base_url=base_url)
        self._server: uvicorn.Server | None = None
        self.app = self._make_app(pool, limits)

    @property
    def base_url(self) -> str:
        """Of the OpenAI routes, ending in `/v1`."""
        return self._sessions.base_url

    @property
    def counts(self) -> Mapping[str, int]:
        """What was not done as callers asked, by name: ignored fields, capped lengths, answers given again."""
        return self._service.counts

    def open(self, rollout: Rollout, sampling: Sampling) -> Session:
        """Let a rollout of the pool call the model; `sampling` holds for calls that do not say otherwise."""
        return self._sessions.open(rollout, sampling)

    def close(self, rollout_id: str) -> None:
        """Refuse the rollout's calls from now on; those that run are cancelled."""
        self._sessions.close(rollout_id)

    async def __aenter__(self) -> Self:
        bound = _bind(*self._address)
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            backlog=4096,
            timeout_graceful_shutdown=GRACE_S,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[bound])  # without `serve`: signals and the loop are the caller's
        self._server = server
        port = bound.getsockname()[1]
        self._sessions.base_url = f"http://{_reachable(self._address[0])}:{port}/v1"
        self._events.emit("gateway.start", base_url=self.base_url, model=self._service.engine.model, **self._bridge_report())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._sessions.close_all()
        if self._server is not None:
            await self._server.shutdown()
            self._server = None
        self._events.emit("gateway.stop", counts=dict(self.counts))

    def _bridge_report(self) -> dict[str, object]:
        result = self._service.renderer.bridge.result
        unproven = [
            f"{'tools ' if s.tools else ''}{s.reply} then {s.follows or 'nothing'}: {why}" for s, why in result.unproven.items()
        ]
        return {"bridge_proven": len(result.proven), "bridge_unproven": unproven}

    def _make_app(self, pool: Pool, limits: Limits) -> Starlette:
        control = Control(pool, self._sessions, limits)
        dialects: list[Dialect] = [DIALECTS.load(name)(self._service.renderer.tokenizer) for name in DIALECTS]
        routes = [
            Route(
                each.path,
                Guarded(ModelRoute(each, self._service, self._sessions, limits), Needs.MODEL, self.tokens),
                methods=["POST"],
            )
            for each in dialects
        ]
        plain: list[tuple[str, str, Needs, Endpoint]] = [
            ("GET", "/v1/models", Needs.MODEL, self._models),
            ("GET", "/health", Needs.NOTHING, self._health),
            ("POST", "/rollouts", Needs.CONTROL, control.open),
            ("POST", "/rollouts/{rollout_id}/grade", Needs.CONTROL, control.grade),
            ("POST", "/rollouts/{rollout_id}/end", Needs.CONTROL, control.end),
        ]
        routes += [
            Route(path, Guarded(_Plain(serve), needs, self.tokens), methods=[method]) for method, path, needs, serve in plain
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})

    async def _models(self, request: Request) -> Response:
        engine = self._service.engine
        model = {
            "id": engine.model,
            "object": "model",
            "created": 0,
            "owned_by": "penstock",
            "max_model_len": engine.context_length,
        }
        return reply({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        engine = self._service.engine
        return reply({"status": "ok", "model": engine.model, "policy_version": engine.version, "rollouts": len(self._sessions)})


class Guarded:
    """An endpoint behind what it needs: nothing of it runs for a caller who may not."""

    def __init__(self, endpoint: ASGIApp, needs: Needs, tokens: Tokens) -> None:
        self.needs = needs
        self._endpoint = endpoint
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, then serve."""
        try:
            scope["rollout_id"] = self._tokens.admit(self.needs, scope["headers"])
            await self._endpoint(scope, receive, send)
        except PenstockError as error:
            await Line(send, error_body).refuse(as_refusal(error))


class _Plain:
    """A request-response function as an ASGI endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return reply(error_body(RequestError(text, status=error.status_code, code="no_such_route")), error.status_code)


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anybody is told of it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # asyncio sets TCP_NODELAY only where the protocol is named
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        why = f"the gateway cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError(f"{why}; set gateway.port to another port, or to 0 for a free one") from error
    return bound


def _reachable(host: str) -> str:
    """Where a client on this machine finds a server on `host`."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
