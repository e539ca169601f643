"""Every route with what it needs of its caller; whatever is not listed is refused.

Model routes may carry the token in the path, before `/v1`, for clients that cannot send a key of their own, and after it the
transcript: `/{token}/v1/…`, `/{token}/{transcript}/v1/…`. A trajectory's uid in its place is followed by its prompt's:
`/{trajectory}/{prompt}/v1/…`, where its flow routes are too. A client whose base URL has no `/v1`, or adds one, is served too.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import PenstockError, RequestError
from penstock.gateway.auth import Needs, Tokens
from penstock.gateway.dialects.chat import error_body
from penstock.gateway.model_routes import VISIT, as_refusal
from penstock.gateway.pending_response import AGAIN, RETRY_AFTER_S
from penstock.http.asgi import header

DEFAULT_PROMPT = "1"

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[RequestError], dict[str, Any]]


class Route(NamedTuple):
    """One method and path. A segment in braces takes any value, which `scope["path_params"]` then has."""

    method: str
    path: str
    needs: Needs
    endpoint: ASGIApp
    error: ErrorBody = error_body
    """How this route's clients expect to be refused."""


class Routes:
    """The gateway as an ASGI application."""

    def __init__(self, routes: Iterable[Route], tokens: Tokens, *, hosts: frozenset[str] | None, refused: Counter[str]) -> None:
        self.listed = tuple(routes)
        self._refused = refused
        self._tokens = tokens
        self._hosts = hosts
        """Names under which clients may know us; None takes any."""
        self._known: set[str] = set()
        """Host headers that named us."""
        self._shapes = tuple(map(_shape, self.listed))
        self._exact = {(route.method, _segments(route.path)): route for route in self.listed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find the route, admit the caller, serve."""
        if scope["type"] != "http":
            return
        route: Route | None = None
        try:
            self._check_host(scope)
            if self._tokens.is_open:
                self._check_origin(scope)
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            found = self._find(method, _segments(scope["path"]))
            route, scope["path_params"], token, transcript = found
            rollout_id = scope["rollout_id"] = self._tokens.admit(route.needs, scope["headers"], token)
            named_plainly = rollout_id == token
            scope["transcript"] = "" if named_plainly else transcript
            scope[VISIT] = (transcript or DEFAULT_PROMPT) if named_plainly else None
            await route.endpoint(scope, receive, send)
        except PenstockError as error:
            refusal = as_refusal(error)
            self._refused[refusal.code] += 1
            body = (route.error if route else error_body)(refusal)
            later = {"retry-after": RETRY_AFTER_S.decode()} if refusal.status in AGAIN else None
            await reply(body, refusal.status, later)(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Refuse a request that a web page was tricked into sending: its Host is a name that we do not go by."""
        if self._hosts is None:
            return
        given = header(scope["headers"], b"host")
        if given in self._known:
            return
        name = urlsplit(f"//{given}").hostname or ""
        if name in self._hosts:
            self._known = {*self._known, given} if len(self._known) < 100 else {given}
        else:
            text = f"this gateway is not called {name!r}; add the name to gateway.hosts if it is yours"
            raise RequestError(text, status=421, code="wrong_host")

    def _check_origin(self, scope: Scope) -> None:
        """Refuse what a page of another site sends: where no token is asked for, a browser on this machine could be made to."""
        origin = header(scope["headers"], b"origin")
        if origin and (urlsplit(origin).hostname or "") not in (self._hosts or ()):
            text = f"an open gateway serves no page of {origin}; call it from a program, or start it without --open"
            raise RequestError(text, status=403, code="wrong_origin")

    def _find(self, method: str, segments: tuple[str, ...]) -> "Found":
        """The route, and what its path says; RequestError 404 or 405."""
        if (route := self._exact.get((method, segments))) is not None:
            return Found(route, {}, "", "")
        others: set[str] = set()
        for shape in self._shapes:
            found = _match(shape, segments)
            if found is not None and found.route.method == method:
                return found
            others |= {found.route.method} if found is not None else set()
        path = "/" + "/".join(segments)
        if others:
            raise RequestError(f"{method} {path}: use {', '.join(sorted(others))}", status=405, code="wrong_method")
        raise RequestError(f"{method} {path}: there is no such route", status=404, code="no_such_route")


class Found(NamedTuple):
    """A route and what a path says to it."""

    route: Route
    params: dict[str, str]
    token: str
    transcript: str


class Plain:
    """A request-response function as an ASGI endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def reply(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _segments(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part)


class Shape(NamedTuple):
    """What the path of a route looks like: what stands before `pattern`, less any `/v1`, is for the caller to say."""

    route: Route
    pattern: tuple[str, ...]
    before: tuple[str, ...] | None
    """Names of what must stand there; None for a model route, which may have a token and a transcript there."""


def _shape(route: Route) -> Shape:
    pattern = _segments(route.path)
    if route.needs is Needs.MODEL:
        return Shape(route, pattern[1:] if pattern[0] == "v1" else pattern, None)
    if "v1" in pattern:  # under a base URL
        place = pattern.index("v1")
        return Shape(route, pattern[place + 1 :], pattern[:place])
    return Shape(route, pattern, ())


def _match(shape: Shape, segments: tuple[str, ...]) -> Found | None:
    route, pattern, names = shape
    size = len(segments) - len(pattern)
    if size < 0 or (params := _params(pattern, segments[size:])) is None:
        return None
    if names == ():
        return Found(route, params, "", "") if size == 0 else None
    while size and segments[size - 1] == "v1":
        size -= 1
    if names is None:
        return Found(route, params, *(*segments[:size], "", "")[:2]) if size <= 2 else None
    before = _params(names, segments[:size])
    return None if before is None else Found(route, before | params, "", "")


def _params(pattern: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    if len(pattern) != len(segments):
        return None
    params: dict[str, str] = {}
    for expected, given in zip(pattern, segments, strict=True):
        if expected.startswith("{"):
            params[expected.strip("{}")] = given
        elif expected != given:
            return None
    return params
