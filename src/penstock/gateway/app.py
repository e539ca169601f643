"""The gateway: what is served where, and the server that it runs on."""

import socket
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from penstock.engines.base import Engine
from penstock.errors import ConfigError, RequestError
from penstock.events import Events
from penstock.gateway.auth import Needs, Tokens
from penstock.gateway.calls import Limits
from penstock.gateway.control import Control
from penstock.gateway.dialects import DIALECTS
from penstock.gateway.dialects.base import Dialect
from penstock.gateway.endpoint import CountRoute, ModelRoute
from penstock.gateway.flights import Told
from penstock.gateway.redact import Redactor
from penstock.gateway.routes import Plain, Route, Routes, reply
from penstock.gateway.serve import Service
from penstock.gateway.sessions import Session, Sessions
from penstock.pool.base import Pool
from penstock.records import Rollout, Sampling
from penstock.render.renderer import Renderer

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Gateway:
    """Where agents send their calls. `async with` serves it on a socket; `app` is the same without one.

    `sampling` gives defaults by channel for rollouts that were opened by another process; `open` gives them otherwise. `hosts` are
    further names that clients may call it by; `secrets` are values that must not be kept in any text.
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
        hosts: Collection[str] = (),
        secrets: Collection[str] = (),
    ) -> None:
        self._limits = limits = limits or Limits()
        self.tokens = Tokens(secret)
        self._events = events or Events()
        self._address = (host, port)
        redactor = Redactor([self.tokens.control, self.tokens.admin, *secrets])
        self._service = Service(engine, renderer, pool, self._events, limits=limits, redactor=redactor)
        base_url = f"http://{_reachable(host)}:{port}/v1"
        self._sessions = Sessions(pool, self.tokens, defaults=sampling or {}, limits=limits, base_url=base_url)
        self._server: uvicorn.Server | None = None
        self.app = Routes(self._routes(pool), self.tokens, hosts=_known_names(host, hosts))

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
            timeout_graceful_shutdown=max(1, round(self._limits.drain_s)),
            proxy_headers=False,
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
        await self._sessions.drain(self._limits.drain_s if kind is None else 0.0)
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

    def _routes(self, pool: Pool) -> list[Route]:
        limits, sessions, service, told = self._limits, self._sessions, self._service, Told()
        routes: list[Route] = []
        dialects: list[Dialect] = [DIALECTS.load(name)(service.renderer.tokenizer) for name in DIALECTS]
        for each in dialects:
            model = ModelRoute(each, service, sessions, limits=limits, told=told)
            routes.append(Route("POST", each.path, Needs.MODEL, model, each.error))
            if each.count_path is not None:
                count = CountRoute(each, service, sessions, limits=limits)
                routes.append(Route("POST", each.count_path, Needs.MODEL, count, each.error))
        control = Control(pool, sessions, limits)
        return [
            *routes,
            Route("GET", "/v1/models", Needs.MODEL, Plain(self._models)),
            Route("GET", "/v1/models/{model}", Needs.MODEL, Plain(self._model)),
            Route("GET", "/", Needs.NOTHING, Plain(self._health)),
            Route("GET", "/health", Needs.NOTHING, Plain(self._health)),
            Route("POST", "/rollouts", Needs.CONTROL, Plain(control.open)),
            Route("POST", "/rollouts/{rollout_id}/grade", Needs.CONTROL, Plain(control.grade)),
            Route("POST", "/rollouts/{rollout_id}/end", Needs.CONTROL, Plain(control.end)),
        ]

    async def _models(self, request: Request) -> Response:
        model = self._describe()
        return reply({"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["model"] != self._service.engine.model:
            text = f"there is no model {request.path_params['model']!r}; this gateway serves {self._service.engine.model!r}"
            raise RequestError(text, status=404, code="model_not_found", param="model")
        return reply(self._describe())

    def _describe(self) -> dict[str, object]:
        """The model in a form that clients of every dialect read."""
        engine = self._service.engine
        own = {"id": engine.model, "object": "model", "created": 0, "owned_by": "penstock", "max_model_len": engine.context_length}
        return own | {"type": "model", "display_name": engine.model, "created_at": "1970-01-01T00:00:00Z"}

    async def _health(self, request: Request) -> Response:
        engine = self._service.engine
        return reply({"status": "ok", "model": engine.model, "policy_version": engine.version, "rollouts": len(self._sessions)})


def _known_names(host: str, others: Collection[str]) -> frozenset[str] | None:
    """What clients may call us; any name where we listen on every interface and none is given."""
    if host in LOOPBACK or others:
        return LOOPBACK | {host, *others}
    return None


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
