"""The dashboard's HTTP app: a page of static files, and JSON routes that read. Every screen is one route.

What agents wrote is data: it is sent as JSON, and the page shows it as text only. The policy in `HEADERS` forbids anything else.
"""

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import ConfigError, PenstockError, PoolError, RequestError
from penstock.events import json_line
from penstock.http.asgi import header, host_name
from penstock.http.listen import base_url, bind, known_names
from penstock.http.server import HttpServer
from penstock.pool.base import PoolClass, PoolDatabase
from penstock.pool.reads import list_channels
from penstock.view import evaluations, overview, rollouts
from penstock.view.queries import cut, ended_page, exists, group_rows
from penstock.view.run_files import ViewedRun
from penstock.view.search import search_page
from penstock.view.sources import OpenRuns, RunSource
from penstock.view.timeline import DEFAULT_S, timeline

STATIC = Path(__file__).parent / "static"
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
HEADERS = {
    "content-security-policy": f"{PAGE_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.suffix in KINDS}
"""Everything the page needs, by name: no path of a caller is ever opened."""
MAX_STREAMS = 64
"""Pages that get changes at once."""
MAX_STREAM_S = 3600.0
POLL_S = 1.0
BEAT_S = 15.0
"""A quiet stream says that it is alive so often."""
READERS = 4
"""Requests that read a pool at once; others wait."""
DRAIN_S, READER_S = 1.0, 60.0
log = logging.getLogger(__name__)

Query = Callable[["ScreenRequest"], dict[str, Any]]


class ScreenRequest:
    """A request's query, checked: each parameter once and of bounded length."""

    def __init__(self, request: Request, runs: OpenRuns) -> None:
        self._values = dict(request.query_params)
        self._runs = runs

    @property
    def runs(self) -> OpenRuns:
        return self._runs

    @property
    def run_id(self) -> str:
        return self.text("run")

    def files(self) -> ViewedRun:
        return self._runs.get(self.run_id)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name, default)
        if value is None or (not value and default is None):
            raise RequestError(f"the query needs {name}=…", code="missing_parameter", param=name)
        if len(value) > 1000:
            raise RequestError(f"{name} is longer than 1000 characters", code="invalid_value", param=name)
        return value

    def number(self, name: str, default: int) -> int:
        value = self._values.get(name, "")
        if not value:
            return default
        if not value.isascii() or not value.isdecimal() or len(value) > 18:
            raise RequestError(f"{name} must be a whole number", code="invalid_value", param=name)
        return int(value)

    def seconds(self, name: str) -> float | None:
        value = self._values.get(name, "")
        if not value:
            return None
        if not value.replace(".", "", 1).isascii() or not value.replace(".", "", 1).isdecimal() or len(value) > 20:
            raise RequestError(f"{name} must be a number of seconds", code="invalid_value", param=name)
        return float(value)


# Screens: one function each, run in a thread.


def runs_screen(asked: ScreenRequest) -> dict[str, Any]:
    return overview.runs_list(asked.runs)


def run_screen(asked: ScreenRequest) -> dict[str, Any]:
    files = asked.files()
    if files.why_no_pool():
        return overview.run_overview(files, asked.run_id, None)
    with reading(files) as database:
        return overview.run_overview(files, asked.run_id, database)


def metrics_screen(asked: ScreenRequest) -> dict[str, Any]:
    return overview.metrics_columns(asked.files(), after=asked.number("after", 0))


def step_screen(asked: ScreenRequest) -> dict[str, Any]:
    files, step = asked.files(), asked.number("step", 0)
    entry = files.metrics.entry(step)
    if entry is None:
        raise RequestError(f"the run has no step {step} yet", status=404, code="unknown_step")
    with reading(files) as database:
        names: list[str] = entry.get("group_ids") or []
        rows = group_rows(database, names[:500])
        return overview.step_groups(files, rows, step)


def groups_screen(asked: ScreenRequest) -> dict[str, Any]:
    files = asked.files()
    with reading(files) as database:
        before = asked.number("before", overview.AFTER_LAST)
        return overview.group_list(
            files, database, channel=asked.text("channel", "train"), state=asked.text("state", ""), before=before
        )


def ended_screen(asked: ScreenRequest) -> dict[str, Any]:
    files = asked.files()
    with reading(files) as database:
        before = asked.number("before", overview.AFTER_LAST)
        page = ended_page(database, asked.text("channel", "train"), asked.text("end"), before=before)
        found = [{**each._asdict(), "message": cut(each.message, 500)} for each in page.found]
        return {"rollouts": found, "before": page.before}


def search_screen(asked: ScreenRequest) -> dict[str, Any]:
    files, text = asked.files(), asked.text("text").strip()
    if not text:
        raise RequestError("the query needs text=…, words to look for", code="missing_parameter", param="text")
    with reading(files) as database:
        channel, before = asked.text("channel", "train"), asked.number("before", overview.AFTER_LAST)
        page = search_page(database, channel, text, before=before)
        found = [each._asdict() for each in page.found]
        return {"found": found, "groups": page.groups, "before": page.before, "channels": list_channels(database)}


def group_screen(asked: ScreenRequest) -> dict[str, Any]:
    files = asked.files()
    with reading(files) as database:
        return rollouts.group_screen(files, database, asked.text("group"))


def rollout_screen(asked: ScreenRequest) -> dict[str, Any]:
    files = asked.files()
    with reading(files) as database:
        return rollouts.rollout_screen(files, database, asked.text("rollout"), first=asked.number("first", 0))


def call_screen(asked: ScreenRequest) -> dict[str, Any]:
    with reading(asked.files()) as database:
        return rollouts.call_screen(database, asked.text("rollout"), asked.number("call", 0))


def tokens_screen(asked: ScreenRequest) -> dict[str, Any]:
    files, first = asked.files(), asked.number("first", -1)
    with reading(files) as database:
        return rollouts.tokens_screen(
            files, database, asked.text("rollout"), asked.number("call", 0), first=None if first < 0 else first
        )


def timeline_screen(asked: ScreenRequest) -> dict[str, Any]:
    files, until, span_s = asked.files(), asked.seconds("until"), asked.seconds("span") or DEFAULT_S
    if files.why_no_pool():
        return timeline(files.path, None, until=until, span_s=span_s)
    with reading(files) as database:
        return timeline(files.path, database, until=until, span_s=span_s)


def pool_screen(asked: ScreenRequest) -> dict[str, Any]:
    files = asked.files()
    with reading(files) as database:
        return overview.pool_state(files, database, before=asked.number("before", overview.AFTER_LAST))


def find_screen(asked: ScreenRequest) -> dict[str, Any]:
    """Says what a text names in a run: a rollout, a group or a step."""
    files, text = asked.files(), asked.text("text").strip()
    if text.isascii() and text.isdecimal() and len(text) < 12 and files.metrics.entry(int(text)):
        return {"kind": "step", "id": text}
    with reading(files) as database:
        kind = next((kind for kind in ("rollout", "group") if exists(database, f"{kind}s", text)), None)
    return {"kind": kind, "id": text}


def evals_screen(asked: ScreenRequest) -> dict[str, Any]:
    named = [name for name in asked.text("runs", "").split(",") if name][:8]
    return evaluations.evaluation_table(asked.runs, named)


SCREENS: dict[str, Query] = {
    "runs": runs_screen,
    "run": run_screen,
    "metrics": metrics_screen,
    "step": step_screen,
    "groups": groups_screen,
    "ended": ended_screen,
    "search": search_screen,
    "group": group_screen,
    "rollout": rollout_screen,
    "call": call_screen,
    "tokens": tokens_screen,
    "timeline": timeline_screen,
    "pool": pool_screen,
    "find": find_screen,
    "evals": evals_screen,
}


@contextmanager
def reading(files: ViewedRun) -> Generator[PoolDatabase]:
    """Opens the run's pool for reading; RequestError 404 if it has none."""
    if reason := files.why_no_pool():
        raise RequestError(f"{files.path.name}: {reason}", status=404, code="no_pool")
    kind: type[PoolClass] = files.pool.kind
    with kind.reading(files.path, files.pool.url) as database:
        yield database


# The app


class ViewApp:
    """The routes over one source of runs. `authorize` raises RequestError for a caller who may not read."""

    def __init__(self, source: RunSource, authorize: Callable[[Request], None] | None = None) -> None:
        self._runs = OpenRuns(source)
        self._authorize = authorize
        self._readers = asyncio.Semaphore(READERS)
        self._streams = 0

    def routes(self, prefix: str = "") -> list[Route]:
        paths = {"/": self._page, "/{file}": self._file, "/api/{screen}": self._screen}
        return [Route(f"{prefix}{path}", endpoint, methods=["GET"]) for path, endpoint in paths.items()]

    async def _page(self, request: Request) -> Response:
        return Response(FILES["index.html"], media_type="text/html", headers=HEADERS)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in FILES:
            return error_response(RequestError("no such page; go back to the list of runs", status=404, code="not_found"))
        return Response(FILES[name], media_type=KINDS[Path(name).suffix], headers=HEADERS)

    async def _screen(self, request: Request) -> Response:
        live = request.path_params["screen"] == "live"
        return await answered(self._stream(request) if live else self._answer(request))

    async def _answer(self, request: Request) -> Response:
        self._check(request)
        query = SCREENS.get(request.path_params["screen"])
        if query is None:
            raise RequestError("no such screen; go back to the list of runs", status=404, code="not_found")
        asked = ScreenRequest(request, self._runs)
        async with self._readers:
            content = await asyncio.to_thread(lambda: json_line(query(asked)))
        return Response(content, media_type="application/json", headers=HEADERS)

    async def _stream(self, request: Request) -> Response:
        self._check(request)
        asked = ScreenRequest(request, self._runs)
        files = await asyncio.to_thread(asked.files)
        if self._streams >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages follow runs already; close some"
            raise RequestError(text, status=503, code="too_many_streams")
        return StreamingResponse(self._changes(files), media_type="text/event-stream", headers=HEADERS)

    async def _changes(self, files: ViewedRun) -> AsyncIterator[bytes]:
        """Sends an event whenever the run's files change."""
        self._streams += 1
        try:
            began = said = time.monotonic()
            before = ""
            while time.monotonic() - began < MAX_STREAM_S:
                now = await asyncio.to_thread(files.fingerprint)
                if now != before:
                    before, said = now, time.monotonic()
                    yield b"data: %b\n\n" % orjson.dumps({"status": files.status(), "changed": files.changed()})
                elif time.monotonic() - said > BEAT_S:
                    said = time.monotonic()
                    yield b": \n\n"
                await asyncio.sleep(POLL_S)
        finally:
            self._streams -= 1

    def _check(self, request: Request) -> None:
        origin = request.headers.get("origin", "")
        site = request.headers.get("sec-fetch-site", "same-origin")
        own = {f"http://{request.headers.get('host', '')}", f"https://{request.headers.get('host', '')}"}
        if (origin and origin not in own) or site not in ("same-origin", "none"):
            raise RequestError("a page of another site asked; open the dashboard itself", status=403, code="wrong_origin")
        if self._authorize is not None:
            self._authorize(request)


async def answered(made: Any) -> Response:
    """Returns the response, or the error as JSON."""
    try:
        return await made
    except ClientDisconnect:
        return Response(status_code=400)
    except Exception as error:
        return error_response(error)


def error_response(error: Exception) -> Response:
    if isinstance(error, RequestError):
        status, code = error.status, error.code
    elif isinstance(error, PoolError):
        status, code = 409, "unreadable_pool"
    elif isinstance(error, ConfigError):
        status, code = 400, "unreadable_run"
    else:
        log.error("a screen failed", exc_info=error)
        status, code = 500, "internal_error"
    text = str(error) if isinstance(error, PenstockError) else "the dashboard failed on this screen; its log says how"
    retry = {"retry-after": "10"} if status == 503 else {}
    body = json_line({"error": {"message": text[:2000], "code": code}})
    return Response(body, status_code=status, media_type="application/json", headers=HEADERS | retry)


async def _routing_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = "no such page; go back to /" if status == 404 else "only GET is served here"
    return Response(
        json_line({"error": {"message": text, "code": "not_found"}}),
        status_code=status,
        media_type="application/json",
        headers=HEADERS,
    )


class ViewHostCheck:
    """Middleware: refuses host names that are not this server's, so that no other site's name can lead here (DNS rebinding)."""

    def __init__(self, app: ASGIApp, names: Collection[str] | None) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._names is not None:
            name = host_name(header(scope["headers"], b"host"))
            if name not in self._names:
                text = f"this dashboard is not called {name!r}; open it under the address that it printed"
                await error_response(RequestError(text, status=421, code="wrong_host"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_view_app(source: RunSource, *, names: Collection[str] | None, token: str = "") -> Starlette:
    """Builds the app of `penstock view`. With a `token`, only callers who send it as a bearer may read."""

    def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
            raise RequestError(
                "the token is missing or wrong; paste the one that `penstock view` printed", status=401, code="token"
            )

    app = Starlette(
        routes=ViewApp(source, authorize if token else None).routes(), exception_handlers={HTTPException: _routing_error}
    )
    app.router.redirect_slashes = False
    app.add_middleware(ViewHostCheck, names=names)
    return app


@asynccontextmanager
async def serve_view(
    source: RunSource, *, host: str, port: int, names: Collection[str] = (), token: str = ""
) -> AsyncGenerator[str]:
    """Serves the dashboard; yields its address."""
    with _bind(host, port) as bound:
        app = make_view_app(source, names=known_names(host, names), token=token)
        async with HttpServer(app, bound, drain_s=DRAIN_S, reader_s=READER_S):
            yield base_url(host, bound.getsockname()[1], names).removesuffix("/v1") + "/"


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except ConfigError as error:
        raise ConfigError(
            f"the dashboard cannot listen on {host}:{port}: {error.__cause__}; choose another --port, or 0"
        ) from error
