"""Routing: finds the route of a request and checks its token. A path that is not listed is refused.

For clients that cannot send a key of their own, the path of a model route may hold the token, and after it the transcript:
`/{token}/v1/…`, `/{token}/{transcript}/v1/…`. A trajectory's uid may stand in place of the token, followed by the prompt's uid:
`/{trajectory}/{prompt}/v1/…`, where its flow routes are too. Base URLs without `/v1`, or with two, work as well.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import PenstockError, RequestError
from penstock.gateway.auth import Access, GatewayTokens
from penstock.gateway.dialects.chat import error_body
from penstock.gateway.model_routes import as_request_error
from penstock.gateway.request import CALL_SCOPE, CallScope
from penstock.gateway.response import RETRYABLE_STATUSES, retry_after
from penstock.http.asgi import header, host_name

DEFAULT_PROMPT = "1"

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[RequestError], dict[str, Any]]


class Route(NamedTuple):
    """One method and path. The value of a segment in braces goes to `scope["path_params"]`."""

    method: str
    path: str
    access: Access
    endpoint: ASGIApp
    error: ErrorBody = error_body
    """Formats errors as this route's clients expect them."""


class Routes:
    """The gateway as an ASGI application."""

    def __init__(
        self, routes: Iterable[Route], tokens: GatewayTokens, *, hosts: frozenset[str] | None, refused: Counter[str]
    ) -> None:
        self.listed = tuple(routes)
        self._refused = refused
        self._tokens = tokens
        self._hosts = hosts
        """Host names that clients may use; None allows any."""
        self._patterns = tuple(map(_path_pattern, self.listed))
        self._exact = {(route.method, _segments(route.path)): route for route in self.listed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route: Route | None = None
        try:
            self._check_host(scope)
            if self._tokens.is_open:
                self._check_origin(scope)
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            route, scope["path_params"], token, transcript = self._find(method, _segments(scope["path"]))
            rollout_id = self._tokens.authorize(route.access, scope["headers"], token)
            if rollout_id == token:  # then the second segment is the prompt's uid
                scope[CALL_SCOPE] = CallScope(rollout_id, "", transcript or DEFAULT_PROMPT, bool(token))
            else:
                scope[CALL_SCOPE] = CallScope(rollout_id, transcript)
            await route.endpoint(scope, receive, send)
        except PenstockError as error:
            refusal = as_request_error(error)
            self._refused[refusal.code] += 1
            body = (route.error if route else error_body)(refusal)
            retry_header = {"retry-after": retry_after(refusal).decode()} if refusal.status in RETRYABLE_STATUSES else None
            await json_response(body, refusal.status, retry_header)(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Refuse a Host header that is none of our names, against DNS rebinding by web pages."""
        if self._hosts is None:
            return
        name = host_name(header(scope["headers"], b"host"))
        if name not in self._hosts:
            text = f"this gateway is not called {name!r}; add the name to gateway.hosts if it is yours"
            raise RequestError(text, status=421, code="wrong_host")

    def _check_origin(self, scope: Scope) -> None:
        """Refuse requests from pages of other sites: an open gateway asks for no token that would stop them."""
        origin = header(scope["headers"], b"origin")
        if origin and host_name(origin.partition("://")[2]) not in (self._hosts or ()):
            text = f"an open gateway serves no page of {origin[:100]}; call it from a program, or start it without --open"
            raise RequestError(text, status=403, code="wrong_origin")

    def _find(self, method: str, segments: tuple[str, ...]) -> "RouteMatch":
        """The route of a path; RequestError 404 or 405."""
        if (route := self._exact.get((method, segments))) is not None:
            return RouteMatch(route, {}, "", "")
        others: set[str] = set()
        for pattern in self._patterns:
            found = _match(pattern, segments)
            if found is not None and found.route.method == method:
                return found
            others |= {found.route.method} if found is not None else set()
        path = ("/" + "/".join(segments))[:200]
        if others:
            raise RequestError(f"{method} {path}: use {', '.join(sorted(others))}", status=405, code="wrong_method")
        raise RequestError(f"{method} {path}: there is no such route", status=404, code="no_such_route")


class RouteMatch(NamedTuple):
    """A route and the values in the path."""

    route: Route
    params: dict[str, str]
    token: str
    transcript: str


class FunctionEndpoint:
    """A request-response function as an ASGI endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def json_response(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _segments(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part)


class PathPattern(NamedTuple):
    """A route's path as segments. `/v1` between `before` and `pattern` may be left out or repeated."""

    route: Route
    pattern: tuple[str, ...]
    before: tuple[str, ...] | None
    """Segments in front; None for a model route, which may have a token and a transcript there."""


def _path_pattern(route: Route) -> PathPattern:
    pattern = _segments(route.path)
    if route.access is Access.MODEL:
        return PathPattern(route, pattern[1:] if pattern[0] == "v1" else pattern, None)
    if "v1" in pattern:  # under a base URL
        at = pattern.index("v1")
        return PathPattern(route, pattern[at + 1 :], pattern[:at])
    return PathPattern(route, pattern, ())


def _match(path_pattern: PathPattern, segments: tuple[str, ...]) -> RouteMatch | None:
    route, pattern, names = path_pattern
    size = len(segments) - len(pattern)
    if size < 0 or (params := _params(pattern, segments[size:])) is None:
        return None
    if names == ():
        return RouteMatch(route, params, "", "") if size == 0 else None
    while size and segments[size - 1] == "v1":
        size -= 1
    if names is None:
        return RouteMatch(route, params, *(*segments[:size], "", "")[:2]) if size <= 2 else None
    before = _params(names, segments[:size])
    return None if before is None else RouteMatch(route, before | params, "", "")


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
