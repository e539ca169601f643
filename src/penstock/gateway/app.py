"""The gateway: its routes, those that other wheels add, and the server that they run on.

Through the control routes, a runner in another process opens, grades and ends rollouts. They need the control token.
"""

import socket
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.chat.renderer import Renderer
from penstock.engines.base import Engine
from penstock.errors import ConfigError, RequestError
from penstock.events import Events
from penstock.gateway.auth import Access, GatewayTokens
from penstock.gateway.dialects import DIALECTS
from penstock.gateway.dialects.base import Dialect
from penstock.gateway.model_routes import TEXT_DIALECTS, CountRoute, ModelRoute, StoredResponses
from penstock.gateway.observability import CONTENT_TYPE, CallTracer, Samples, as_text
from penstock.gateway.pipeline import CallPipeline
from penstock.gateway.request import GatewayLimits
from penstock.gateway.response import ResponseCache
from penstock.gateway.routes import FunctionEndpoint, Route, Routes, json_response
from penstock.gateway.session import NamedRollouts, Session, Sessions
from penstock.gateway.sources import PolicySources, ServedPolicy, make_source, no_tokens_error
from penstock.http.listen import base_url, bind, is_loopback, known_names
from penstock.pool.base import Pool
from penstock.pool.rows import PictureStore
from penstock.records import Rollout, RolloutRef, Sampling
from penstock.sdk.routing import PLACEHOLDER_MODEL, PLACEHOLDER_NAMES
from penstock.system.processes import protect_memory
from penstock.system.redaction import Redactor

if TYPE_CHECKING:
    from penstock.http.server import HttpServer
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from penstock.codec import from_json
from penstock.errors import PoolError, PoolFailed
from penstock.gateway.session import make_task, open_adhoc, pool_refusals
from penstock.http.asgi import JsonBudget, parse_json, read_body
from penstock.pool.base import AFTER_ALL
from penstock.records import ADHOC_CHANNEL, MAX_REWARD, End, Grade, Message
from penstock.registry import Registry

LAST_BYTES_S = 1.0
"""How long a stopping gateway lets callers read responses that are written."""


class Gateway:
    """Serves model calls and records them. `async with` serves on a socket; `app` is the ASGI application without one.

    sampling: defaults by channel for rollouts that another process opened; `open` gives them for its own.
    hosts: further host names that clients may use.
    secrets: values that are removed from every recorded text.
    sock: a bound socket, used instead of host and port.
    is_open: only the control routes need a token; it then listens on this machine only.
    sessions: the session key opens a rollout for each session id that clients send.
    closed: routes that are refused, by the token that they need. A run with a grader closes those that open, grade or end
        rollouts: only its runner does that, so a caller with such a token has stolen it.
    policies: by the model name that agents ask for; without them `engine` answers under every name.
    pictures: where pictures are kept that the engine's model is shown; without it, it is shown none.
    has_run: whether a run grades the rollouts.
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
        limits: GatewayLimits | None = None,
        hosts: Collection[str] = (),
        secrets: Collection[str] = (),
        sock: socket.socket | None = None,
        tracer: CallTracer | None = None,
        is_open: bool = False,
        sessions: bool = False,
        closed: Collection[Access] = (),
        policies: Mapping[str, ServedPolicy] | None = None,
        pictures: PictureStore | None = None,
        has_run: bool = True,
    ) -> None:
        self._closed = frozenset(closed)
        self._limits = limits = limits or GatewayLimits()
        self.tokens = GatewayTokens(secret, is_open=is_open, sessions=sessions)
        if is_open:
            _require_loopback(sock.getsockname()[0] if sock else host)
        self._events = events or Events()
        self._address = (host, port)
        self._names = tuple(hosts)
        self._sock = sock
        self._tracer = tracer
        redactor = Redactor([self.tokens.control, self.tokens.admin, self.tokens.session_key, *secrets])
        source = make_source(engine, renderer, pictures)
        self._pipeline = CallPipeline(
            source, pool, self._events, limits=limits, redactor=redactor, policies=PolicySources(source, policies or {})
        )
        self._sessions = Sessions(
            pool,
            self.tokens,
            defaults=sampling or {},
            limits=limits,
            base_url=base_url(host, port, hosts),
        )
        self.reward_function: RewardFunction | None = None
        """Computes rewards for plug-ins; None if rewards cannot be computed."""
        self._named = NamedRollouts(pool, self._sessions)
        parts = GatewayParts(
            pool=pool,
            sessions=self._sessions,
            named=self._named,
            pipeline=self._pipeline,
            tokens=self.tokens,
            limits=limits,
            reward_function=lambda: self.reward_function,
            has_run=has_run,
        )
        self._plugins: list[RoutePlugin] = [ROUTES.load(name)(parts) for name in ROUTES]
        self._server: HttpServer | None = None
        refused = self._pipeline.metrics.refused
        self.app = Routes(self._routes(pool), self.tokens, hosts=known_names(host, hosts), refused=refused)

    @property
    def base_url(self) -> str:
        """The address of the OpenAI routes, ending in `/v1`."""
        return self._sessions.base_url

    @property
    def counts(self) -> Mapping[str, int]:
        """What was not done as callers asked, by name: ignored fields, capped lengths, replayed answers."""
        return self._pipeline.metrics.notices

    def samples(self) -> Samples:
        """The metrics of this process."""
        engine = self._pipeline.engine
        return self._pipeline.metrics.samples(model=engine.model, version=engine.version, rollouts=len(self._sessions))

    def open(self, rollout: RolloutRef, sampling: Sampling, *, fresh: bool = False) -> Session:
        """Let a rollout of the pool call the model; `sampling` are defaults for its calls.

        With `fresh`, nothing of it is stored yet: its first call need not read the pool.
        """
        return self._sessions.open(rollout, sampling, fresh=fresh)

    def close(self, rollout_id: str) -> Rollout | None:
        """Refuse the rollout's calls from now on and cancel the running ones; see `Sessions.close`."""
        return self._sessions.close(rollout_id)

    async def __aenter__(self) -> Self:
        protect_memory()  # it holds the key that signs all tokens
        from penstock.http.server import HttpServer  # loads uvicorn, which a command that only checks its input does not need

        bound = self._sock or bind(*self._address)
        self._server = await HttpServer(self.app, bound, drain_s=LAST_BYTES_S, reader_s=self._limits.reader_s).__aenter__()
        self._sessions.base_url = base_url(self._address[0], bound.getsockname()[1], self._names)
        self._events.emit(
            "gateway.start", base_url=self.base_url, model=self._pipeline.engine.model, **self._pipeline.source.facts()
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._sessions.drain(self._limits.drain_s if kind is None else 0.0)
        self._sessions.close_all()
        if self._server is not None:
            await self._server.__aexit__(kind, error, trace)
            self._server = None
        self._events.emit("gateway.stop", counts=dict(self.counts))

    def _routes(self, pool: Pool) -> list[Route]:
        control = ControlRoutes(pool, self._sessions, self._limits)
        routes = [
            *self._model_routes(),
            Route("GET", "/v1/responses/{response}", Access.MODEL, FunctionEndpoint(self._stored_responses(pool).get)),
            Route("GET", "/v1/models", Access.MODEL, FunctionEndpoint(self._models)),
            Route("GET", "/v1/models/{model}", Access.MODEL, FunctionEndpoint(self._model)),
            Route("GET", f"/v1/models/{PLACEHOLDER_MODEL}", Access.MODEL, FunctionEndpoint(self._model)),
            Route("GET", "/", Access.NONE, FunctionEndpoint(self._health)),
            Route("GET", "/health", Access.NONE, FunctionEndpoint(self._health)),
            Route("GET", "/docs", Access.NONE, FunctionEndpoint(self._docs)),
            Route("GET", "/metrics", Access.ADMIN, FunctionEndpoint(self._metrics)),
            Route("POST", "/rollouts", Access.CONTROL, FunctionEndpoint(control.open)),
            Route("POST", "/rollouts/{rollout_id}/grade", Access.CONTROL, FunctionEndpoint(control.grade)),
            Route("POST", "/rollouts/{rollout_id}/end", Access.CONTROL, FunctionEndpoint(control.end)),
            *(route for plugin in self._plugins for route in plugin.routes()),
        ]
        refuse = FunctionEndpoint(self._refuse_closed)
        return [route._replace(endpoint=refuse) if route.access in self._closed else route for route in routes]

    def _stored_responses(self, pool: Pool) -> StoredResponses:
        return StoredResponses(self._pipeline, self._named.session, pool)

    def _model_routes(self) -> list[Route]:
        limits, pipeline, find, response_cache = self._limits, self._pipeline, self._named.session, ResponseCache()
        routes: list[Route] = []
        sources = pipeline.policies.by_name
        for name in DIALECTS:
            dialects: dict[str, Dialect] = {
                policy: DIALECTS.load(name)(source.tokenizer)
                for policy, source in sources.items()
                if source.dialects is None or name in source.dialects
            }
            if not dialects:
                routes.append(Route("POST", DIALECTS.load(name).path, Access.MODEL, FunctionEndpoint(self._refuse_dialect)))
                continue
            each = next(iter(dialects.values()))
            model: ASGIApp = ModelRoute(
                dialects, pipeline, find, name=name, limits=limits, response_cache=response_cache, tracer=self._tracer
            )
            for plugin in self._plugins:
                model = plugin.model_route(name, model)
            routes.append(Route("POST", each.path, Access.MODEL, model, each.error))
            if each.count_path is not None:
                count = CountRoute(dialects, pipeline, find, limits=limits)
                routes.append(Route("POST", each.count_path, Access.MODEL, count, each.error))
        return routes

    async def _refuse_closed(self, request: Request) -> Response:
        self._pipeline.count("refused:grading")
        refused = "something asked the gateway to open, grade or end a rollout of this run with a valid token; it was refused"
        self._events.emit("grading.refused", path=request.url.path, text=refused)
        text = "rollouts of this run are opened, graded and ended by the run alone; to grade otherwise, change its grader"
        raise RequestError(text, status=409, code="graded_by_run")

    async def _refuse_dialect(self, request: Request) -> Response:
        raise no_tokens_error(self._pipeline.engine.model, TEXT_DIALECTS)

    async def _models(self, request: Request) -> Response:
        models = [self._describe(name) for name in self._pipeline.policies.by_name]
        first, last = models[0]["id"], models[-1]["id"]
        return json_response({"object": "list", "data": models, "has_more": False, "first_id": first, "last_id": last})

    async def _model(self, request: Request) -> Response:
        asked, policies = request.path_params.get("model", PLACEHOLDER_MODEL), self._pipeline.policies
        found = "" if not policies.names and asked == self._pipeline.engine.model else policies.named(asked)
        if found is None and policies.names:
            raise policies.unknown(asked)
        if found is None:
            text = f"there is no model {asked[:200]!r}; this gateway serves {self._pipeline.engine.model!r}"
            raise RequestError(text, status=404, code="model_not_found", param="model")
        return json_response(self._describe(found) | ({"id": asked} if asked in PLACEHOLDER_NAMES else {}))

    def _describe(self, policy: str) -> dict[str, object]:
        """A policy (empty: the one model), with the fields that clients of any dialect read."""
        engine = self._pipeline.policies.by_name[policy].engine
        name = policy or engine.model
        own: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "penstock"}
        room = {"max_model_len": engine.context_length} if engine.context_length else {}
        return own | room | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

    async def _metrics(self, request: Request) -> Response:
        return Response(as_text(self.samples()), media_type=CONTENT_TYPE)

    async def _docs(self, request: Request) -> Response:
        lines = [f"{route.method:4} {route.path}  ({route.access})" for route in self.app.listed]
        return Response("\n".join(lines) + "\n", media_type="text/plain; charset=utf-8")

    async def _health(self, request: Request) -> Response:
        engine = self._pipeline.engine
        return json_response(
            {"status": "ok", "model": engine.model, "policy_version": engine.version, "rollouts": len(self._sessions)}
        )


def _require_loopback(host: str) -> None:
    if not is_loopback(host):
        text = f"an open gateway asks for no token, so it may listen on this machine only, not on {host or 'every interface'}"
        raise ConfigError(f"{text}; use --host 127.0.0.1, or leave --open out")


ROUTES = Registry("gateway routes", {})
"""Classes that follow `RoutePlugin`, from the entry points of the group `penstock.gateway_routes`."""


class RewardFunction(Protocol):
    def __call__(self, rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> Awaitable[float]:
        """`rollout_id` is empty if unknown; `fields` are of the dataset row. GraderError if there is no reward."""
        ...


class GatewayParts(NamedTuple):
    """What a plug-in gets of the gateway."""

    pool: Pool
    sessions: Sessions
    named: NamedRollouts
    """Opens rollouts that callers name themselves."""
    pipeline: CallPipeline
    tokens: GatewayTokens
    limits: GatewayLimits
    reward_function: Callable[[], RewardFunction | None]
    """Returns the run's grader as a function; None if rewards cannot be computed."""
    has_run: bool
    """Whether a run uses this gateway, and grades its rollouts."""


class RoutePlugin(Protocol):
    """Further routes of a gateway. It is made once, with the gateway; nothing is started or closed."""

    def __init__(self, parts: GatewayParts) -> None: ...

    def routes(self) -> list[Route]:
        """Returns the routes to add, each with the token that it needs."""
        ...

    def model_route(self, dialect: str, route: ASGIApp) -> ASGIApp:
        """Returns the endpoint of a dialect's model route: `route`, or one that changes the request and then calls `route`."""
        ...


T = TypeVar("T", bound=BaseModel)


class ControlBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$")]
"""Safe in a token, a path and a header."""
Name = Annotated[str, Field(max_length=200)]
MAX_BYTES, MAX_VALUES = 1 << 20, 1000
"""The limits of a body."""


class SamplingBody(ControlBody):
    """Changes to the gateway's sampling defaults."""

    max_tokens: int | None = Field(default=None, ge=1, le=2**53)
    temperature: FiniteFloat | None = Field(default=None, ge=0, le=100)
    top_p: FiniteFloat | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**53)
    min_p: FiniteFloat | None = Field(default=None, ge=0, lt=1)


class OpenBody(ControlBody):
    """`POST /rollouts`: an existing rollout by its id, else a new one."""

    rollout_id: Id | None = None
    group_id: Id | None = None
    task_id: str = Field(default=ADHOC_CHANNEL, min_length=1, max_length=1000)
    channel: Id = ADHOC_CHANNEL
    sampling: SamplingBody = SamplingBody()


BoundedReward = Annotated[FiniteFloat, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class GradeBody(ControlBody):
    reward: BoundedReward
    source: Name = "control"
    transcript: Name | None = None
    step: int | None = Field(default=None, ge=0, lt=2**31)


class EndBody(ControlBody):
    end: End = Field(default=End.COMPLETED, strict=False)
    message: str = Field(default="", max_length=100_000)


class ControlRoutes:
    def __init__(self, pool: Pool, sessions: Sessions, limits: GatewayLimits) -> None:
        self._pool = pool
        self._sessions = sessions
        self._limits = limits

    async def open(self, request: Request) -> Response:
        """Open a rollout, made if it does not exist; returns its model token and base URLs.

        The same body with an id gives the same rollout again.
        """
        body = await self._read(request, OpenBody)
        session = await self._sessions.get(await self._find(body) or await self._make(body))
        return json_response(
            {
                "rollout_id": session.rollout_id,
                "token": session.token,
                "base_url": session.base_url,
                "anthropic_base_url": session.base_url.removesuffix("/v1"),
            }
        )

    async def grade(self, request: Request) -> Response:
        """Reward a rollout, one of its transcripts or one of its steps."""
        body = await self._read(request, GradeBody)
        grade = from_json(Grade, orjson.dumps(body.model_dump() | {"rollout_id": request.path_params["rollout_id"]}))
        self._sessions.note_grade(grade.rollout_id)
        with pool_refusals(status=409, code="not_graded"):
            await self._pool.grade(grade)
        return json_response({"rollout_id": grade.rollout_id, "reward": grade.reward})

    async def end(self, request: Request) -> Response:
        """End a rollout. The first end stays; `first` says whether this was it."""
        body = await self._read(request, EndBody)
        rollout_id = request.path_params["rollout_id"]
        with pool_refusals(status=404, code="unknown_rollout"):
            first = await self._pool.end(rollout_id, body.end, body.message)
            end = (await self._pool.rollout(rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)).end
        self._sessions.close(rollout_id)
        return json_response({"rollout_id": rollout_id, "end": end, "first": first})

    async def _find(self, body: OpenBody) -> str | None:
        """The existing rollout, if the body names nothing but its id; else None."""
        if body.rollout_id is None or body.model_fields_set != {"rollout_id"}:
            return None
        try:
            return (await self._pool.rollout(body.rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)).ref.id
        except PoolFailed:
            raise
        except PoolError:
            return None

    async def _make(self, body: OpenBody) -> str:
        sampling = body.sampling.model_dump(exclude_none=True)
        with pool_refusals(status=409, code="rollout_exists"):
            rollout = await open_adhoc(
                self._pool,
                rollout_id=body.rollout_id or "",
                group_id=body.group_id or "",
                task_id=body.task_id,
                channel=body.channel,
                sampling=sampling,
            )
            same = await self._pool.task(rollout.id) == make_task(body.task_id, sampling)
        if not same:
            text = f"rollout {rollout.id} is there with another task or sampling; leave them out, or give another id"
            raise RequestError(text, status=409, code="rollout_exists")
        return rollout.id

    async def _read(self, request: Request, kind: type[T]) -> T:
        body = await read_body(request.receive, min(MAX_BYTES, self._limits.body_bytes)) or b"{}"
        JsonBudget(MAX_VALUES).spend(parse_json(body), "the body")  # pydantic makes an error of each unknown field
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise RequestError(f"{where}: {first['msg']}", code="invalid_value", param=where) from error
