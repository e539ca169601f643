"""The gateway: what is served where, and the server that it runs on."""

import socket
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.chat.renderer import Renderer
from penstock.engines.base import Engine
from penstock.engines.text_endpoints.base import TextEndpoint
from penstock.errors import ConfigError, RequestError
from penstock.events import Events
from penstock.gateway.auth import Needs, Tokens
from penstock.gateway.call import Limits
from penstock.gateway.call_pipeline import Service
from penstock.gateway.control import Control
from penstock.gateway.dialects import DIALECTS
from penstock.gateway.dialects.base import Dialect
from penstock.gateway.flows import FlowRoutes, GenerateRoute, Judge, detail_body
from penstock.gateway.model_routes import CountRoute, ModelRoute
from penstock.gateway.observability import CONTENT_TYPE, Samples, Spans, as_text
from penstock.gateway.pending_response import ResponseCache
from penstock.gateway.read_api import Reading
from penstock.gateway.routes import Plain, Route, Routes, reply
from penstock.gateway.session import Session, Sessions
from penstock.gateway.shared_counters import Peers
from penstock.gateway.sources import Source, TextEndpointSource, TokenSource, no_tokens
from penstock.gateway.trajectories import Trajectories
from penstock.http.listen import base_url, bind, is_loopback, known_names
from penstock.pool.base import Pool
from penstock.records import Attempt, Rollout, Sampling
from penstock.system.redaction import Redactor

if TYPE_CHECKING:
    from penstock.http.server import HttpServer

LAST_BYTES_S = 1.0
"""How long a stopping gateway lets callers take the answers that are written."""


class Gateway:
    """Where agents send their calls. `async with` serves it on a socket; `app` is the same without one.

    `sampling` gives defaults by channel for rollouts that were opened by another process; `open` gives them otherwise. `hosts` are
    further names that clients may call it by; `secrets` are values that must not be kept in any text. A `sock` that is bound goes
    before host and port. `spans` are told of every call; `peers` are the other workers on the same port. With `is_open` only the
    control routes need a token: whoever reaches it may call, grade and read; it then listens on this machine only.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer | None,
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
        sock: socket.socket | None = None,
        spans: Spans | None = None,
        peers: Peers | None = None,
        is_open: bool = False,
    ) -> None:
        self._limits = limits = limits or Limits()
        self.tokens = Tokens(secret, is_open=is_open)
        if is_open:
            _refuse_elsewhere(sock.getsockname()[0] if sock else host)
        self._events = events or Events()
        self._address = (host, port)
        self._names = tuple(hosts)
        self._sock = sock
        self._spans = spans
        self._peers = peers = peers or Peers()
        redactor = Redactor([self.tokens.control, self.tokens.admin, *secrets])
        self._service = Service(_source(engine, renderer), pool, self._events, limits=limits, redactor=redactor)
        self._sessions = Sessions(
            pool,
            self.tokens,
            defaults=sampling or {},
            limits=limits,
            base_url=base_url(host, port, hosts),
            peers=peers,
        )
        self._trajectories = Trajectories(pool, self._sessions, self.tokens)
        self._flows = FlowRoutes(pool, self._sessions, self._trajectories, self._service, tokens=self.tokens, limits=limits)
        self._server: HttpServer | None = None
        refused = self._service.metrics.refused
        self.app = Routes(self._routes(pool), self.tokens, hosts=known_names(host, hosts), refused=refused)

    @property
    def base_url(self) -> str:
        """Of the OpenAI routes, ending in `/v1`."""
        return self._sessions.base_url

    @property
    def counts(self) -> Mapping[str, int]:
        """What was not done as callers asked, by name: ignored fields, capped lengths, answers given again."""
        return self._service.metrics.notices

    @property
    def judge(self) -> Judge | None:
        """What `/compute_reward` asks; None refuses."""
        return self._flows.judge

    @judge.setter
    def judge(self, judge: Judge | None) -> None:
        self._flows.judge = judge

    def samples(self) -> Samples:
        """What this process has counted."""
        engine = self._service.engine
        return self._service.metrics.samples(model=engine.model, version=engine.version, rollouts=len(self._sessions))

    def open(self, rollout: Rollout, sampling: Sampling, *, fresh: bool = False) -> Session:
        """Let a rollout of the pool call the model; `sampling` holds for calls that do not say otherwise.

        Of a `fresh` one nothing is stored yet: its first call need not ask the pool.
        """
        return self._sessions.open(rollout, sampling, fresh=fresh)

    def close(self, rollout_id: str) -> Attempt | None:
        """Refuse the rollout's calls from now on; those that run are cancelled. What it recorded, unless only the pool knows."""
        return self._sessions.close(rollout_id)

    async def __aenter__(self) -> Self:
        from penstock.http.server import HttpServer  # loads uvicorn, which a command that refuses its input has no use for

        bound = self._sock or bind(*self._address)
        self._server = await HttpServer(self.app, bound, drain_s=LAST_BYTES_S, reader_s=self._limits.reader_s).__aenter__()
        self._sessions.base_url = base_url(self._address[0], bound.getsockname()[1], self._names)
        self._events.emit("gateway.start", base_url=self.base_url, model=self._service.engine.model, **self._service.source.facts())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._sessions.drain(self._limits.drain_s if kind is None else 0.0)
        self._sessions.close_all()
        if self._server is not None:
            await self._server.__aexit__(kind, error, trace)
            self._server = None
        self._events.emit("gateway.stop", counts=dict(self.counts))

    def _routes(self, pool: Pool) -> list[Route]:
        control = Control(pool, self._sessions, self._limits)
        return [
            *self._model_routes(),
            Route("GET", "/v1/models", Needs.MODEL, Plain(self._models)),
            Route("GET", "/v1/models/{model}", Needs.MODEL, Plain(self._model)),
            Route("GET", "/", Needs.NOTHING, Plain(self._health)),
            Route("GET", "/health", Needs.NOTHING, Plain(self._health)),
            Route("GET", "/docs", Needs.NOTHING, Plain(self._docs)),
            Route("GET", "/metrics", Needs.ADMIN, Plain(self._metrics)),
            Route("POST", "/rollouts", Needs.CONTROL, Plain(control.open)),
            Route("POST", "/rollouts/{rollout_id}/grade", Needs.CONTROL, Plain(control.grade)),
            Route("POST", "/rollouts/{rollout_id}/end", Needs.CONTROL, Plain(control.end)),
            *self._flow_routes(),
            *self._read_routes(pool),
        ]

    def _model_routes(self) -> list[Route]:
        limits, service, find, told = self._limits, self._service, self._trajectories.session, ResponseCache()
        routes: list[Route] = []
        spoken = service.source.dialects
        names = [name for name in DIALECTS if spoken is None or name in spoken]
        dialects: dict[str, Dialect] = {name: DIALECTS.load(name)(service.source.spelling) for name in names}
        for name in DIALECTS:
            if name not in dialects:
                routes.append(Route("POST", DIALECTS.load(name).path, Needs.MODEL, Plain(self._unspoken)))
        for name, each in dialects.items():
            model: ASGIApp = ModelRoute(each, service, find, name=name, limits=limits, told=told, spans=self._spans)
            if name == "generate":
                model = GenerateRoute(model, self.tokens, body_bytes=limits.body_bytes)
            routes.append(Route("POST", each.path, Needs.MODEL, model, each.error))
            if each.count_path is not None:
                count = CountRoute(each, service, find, limits=limits)
                routes.append(Route("POST", each.count_path, Needs.MODEL, count, each.error))
        return routes

    def _flow_routes(self) -> list[Route]:
        flows, base = self._flows, "/{trajectory}/{prompt}/v1"
        routes = [
            ("/submit_steps", flows.submit),
            ("/compute_reward", flows.reward),
            ("/init_trajectory", flows.init),
            (f"{base}/register_trajectory", flows.register),
            (f"{base}/complete_trajectory", flows.complete),
            ("/complete_trajectory/{trajectory}", flows.complete),
        ]
        ready = Route("GET", "/ready", Needs.NOTHING, Plain(flows.ready), detail_body)
        return [ready, *(Route("POST", path, Needs.FLOW, Plain(endpoint), detail_body) for path, endpoint in routes)]

    def _read_routes(self, pool: Pool) -> list[Route]:
        mode = "open" if self.tokens.is_open else "token"
        reading = Reading(pool, self._service.engine, mode=mode, body_bytes=self._limits.body_bytes)
        read = {
            "config": reading.config,
            "stats": reading.stats,
            "steps": reading.steps,
            "trajectories": reading.trajectories,
            "events": reading.events,
        }
        curation = Route("POST", "/api/curation", Needs.ADMIN, Plain(reading.curate), detail_body)
        gets = [Route("GET", f"/api/{name}", Needs.ADMIN, Plain(endpoint), detail_body) for name, endpoint in read.items()]
        return [*gets, curation]

    async def _unspoken(self, request: Request) -> Response:
        raise no_tokens(self._service.engine.model, "use /v1/chat/completions, /v1/responses or /v1/messages")

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
        own: dict[str, object] = {"id": engine.model, "object": "model", "created": 0, "owned_by": "penstock"}
        room = {"max_model_len": engine.context_length} if engine.context_length else {}
        return own | room | {"type": "model", "display_name": engine.model, "created_at": "1970-01-01T00:00:00Z"}

    async def _metrics(self, request: Request) -> Response:
        return Response(as_text(await self._peers.together(self.samples())), media_type=CONTENT_TYPE)

    async def _docs(self, request: Request) -> Response:
        lines = [f"{route.method:4} {route.path}  ({route.needs})" for route in self.app.listed]
        return Response("\n".join(lines) + "\n", media_type="text/plain; charset=utf-8")

    async def _health(self, request: Request) -> Response:
        engine = self._service.engine
        return reply({"status": "ok", "model": engine.model, "policy_version": engine.version, "rollouts": len(self._sessions)})


def _source(engine: Engine, renderer: Renderer | None) -> Source:
    """Where replies come from: a relay needs no renderer, which every other engine does."""
    if isinstance(engine, TextEndpoint):
        return TextEndpointSource(engine)
    assert renderer is not None, "an engine of tokens needs its model's renderer"
    return TokenSource(engine, renderer)


def _refuse_elsewhere(host: str) -> None:
    if not is_loopback(host):
        text = f"an open gateway asks for no token, so it may listen on this machine only, not on {host or 'every interface'}"
        raise ConfigError(f"{text}; use --host 127.0.0.1, or leave --open out")
