"""The HTTP server: uvicorn's HTTP/1.1 on httptools, with limits on the size and slowness of requests."""

import asyncio
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from types import TracebackType
from typing import Any, Self, cast

import orjson
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.errors import RequestError
from penstock.http.asgi import ON_DISCONNECT
from penstock.http.head import MAX_HEAD_BYTES, MAX_TARGET_BYTES, check_headers, check_host, head_too_large, origin_form

SWEEP_S = 1.0
"""Longest interval between two checks of all connections. They share one timer, so that a request sets none."""
HEAD_S = 30.0
BODY_S = 300.0
"""Time for a body; every byte received extends it."""
MIN_BODY_BYTES_PER_S = 64 * 1024
"""A body that arrives at least this fast is never cut off, whatever its size."""
MAX_PIPELINED_READ, MAX_PIPELINED = 16, 256
"""Limits on requests that wait for an earlier answer on their connection: reading pauses above the first, fails at the second."""
IDLE_S = 120
"""Longer than clients keep an idle connection: if we closed first, a client could be sending its next request."""
LINGER_S = 5.0
"""How long a caller that is refused may keep sending, so that it can read the refusal."""

# Stages: what the caller must send next (a new request, the rest of its head, its body).
NEXT, HEAD, BODY = range(3)

log = logging.getLogger(__name__)


class HttpServerState(ServerState):
    """State that the connections of one server share."""

    def __init__(self, reader_s: float) -> None:
        super().__init__()
        self.reader_s = reader_s
        self.now = 0.0
        """Seconds, advanced by each sweep. It stands still while the loop is blocked, so that callers do not time out for it."""
        self.draining = False
        self.lost = asyncio.Event()
        """Set whenever a connection ends."""


class RequestExchange:
    """One request and its answer. uvicorn calls it as the app; it calls the real app and catches its exceptions."""

    def __init__(self, connection: "HttpConnection", app: ASGIApp) -> None:
        self.cycle: RequestResponseCycle
        self._connection = connection
        self._app = app
        self._call: Callable[[], None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app and log what it raises. The log message names neither body nor target: they may hold secrets."""
        failure = RequestError("the server failed; its log says how", status=500, code="internal_error")
        try:
            await self._app(scope, receive, send)
            if not self.is_over:
                log.error("the app left a %s request without a whole answer", scope["method"])
        except asyncio.CancelledError:  # swallowed: uvicorn would log it, and this task ends here anyway
            if self._connection.shared.draining:
                failure = RequestError("the server is stopping", status=503, code="stopping")
        except Exception as error:
            log.error("the app failed on a %s request", scope["method"], exc_info=error)
        if not self.is_over:
            self._connection.fail(self, failure)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is sent to the caller."""
        return self.cycle.response_complete or self.cycle.disconnected

    def on_disconnect(self, call: Callable[[], None] | None) -> None:
        """See `ON_DISCONNECT`."""
        self._call = call
        if self.cycle.disconnected:
            self.drop()

    def drop(self) -> None:
        """Treat the caller as gone: discard what the app still sends, and call its callback."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        call, self._call = self._call, None
        if call is not None:
            call()


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits, refusals in JSON and a callback to the app when the caller leaves."""

    def __init__(self, config: Config, shared: HttpServerState) -> None:
        super().__init__(config, shared, {})
        self.logger, self.access_log = log, False
        self.shared = shared
        self._serve = cast(ASGIApp, self.app)
        self._exchanges: list[RequestExchange] = []
        """The newest exchange, after those that were unanswered when it began, in order."""
        self._stage = NEXT
        self._deadline = shared.now + HEAD_S
        """Time on `shared.now` by which the caller must finish the current stage."""
        self._unparsed_bytes = 0
        """Bytes read since the last change of stage or piece of body."""
        self._skips_head = False
        """Whether the next head is the one that `_parse` makes."""
        self._ignores_input = False
        self._unread, self._taken_at = 0, shared.now
        """Bytes not yet sent at the last sweep, and when the caller last took some or none were left."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if self.shared.draining:
            transport.close()

    def eof_received(self) -> None:
        self._drop_all()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_all()
        super().connection_lost(exc)
        self.shared.lost.set()

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._unset_keepalive_if_required()
        try:
            unread: bytes | None = data
            while unread is not None:  # a loop: requests that were sent ahead may offer another protocol each
                unread = self._parse(unread)
            if self._unparsed_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large())
        except HttpParserError as error:
            cause = error.__context__  # set if a callback below raised: the parser wraps its exception
            text = f"this is not an HTTP/1.1 request: {cause or error}"
            self._refuse(cause if isinstance(cause, RequestError) else RequestError(text, code="malformed_request"))

    def on_message_begin(self) -> None:
        if not self._skips_head:
            super().on_message_begin()
            self._stage, self._deadline, self._unparsed_bytes = HEAD, self.shared.now + HEAD_S, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            raise RequestError(f"the request's target is longer than {MAX_TARGET_BYTES} bytes", status=414, code="target_too_long")

    def on_headers_complete(self) -> None:
        if self._skips_head:
            self._skips_head = False
            return
        version = self.parser.get_http_version()
        check_headers(version, self.headers)
        self.url = origin_form(self.url, check_host(version, self.headers))
        if len(self.pipeline) >= MAX_PIPELINED:
            raise RequestError(f"more than {MAX_PIPELINED} requests came ahead of their answers", code="malformed_request")
        exchange = RequestExchange(self, self._serve)
        self.scope[ON_DISCONNECT] = exchange.on_disconnect  # type: ignore[typeddict-unknown-key]
        self.app = cast(Any, exchange)
        super().on_headers_complete()
        exchange.cycle = self.cycle
        self._exchanges = [*self._unanswered(), exchange]
        self.headers = []  # a new list: the parser appends trailers, which are not headers
        if len(self.pipeline) <= MAX_PIPELINED_READ:  # uvicorn pauses after one, and would not see the caller leave
            self.flow.resume_reading()
        self._stage, self._deadline, self._unparsed_bytes = BODY, self.shared.now + BODY_S, 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._deadline += len(body) / MIN_BODY_BYTES_PER_S
        self._unparsed_bytes = 0

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the parser wrongly assumes that no body follows; see `_parse`
            return
        super().on_message_complete()
        self._stage, self._deadline, self._unparsed_bytes = NEXT, self.shared.now + IDLE_S, 0

    def shutdown(self) -> None:
        if not (unanswered := self._unanswered()):
            self.transport.close()
        for exchange in unanswered:
            exchange.cycle.keep_alive = False

    def check(self, now: float) -> None:
        """Disconnect a caller that reads or sends too slowly."""
        unread = self.transport.get_write_buffer_size()
        if not unread or unread < self._unread:
            self._taken_at = now
        self._unread = unread
        if now - self._taken_at > self.shared.reader_s:
            self.transport.abort()
        elif self.flow.read_paused or (self._stage == NEXT and (self.timeout_keep_alive_task or self._unanswered())):
            self._deadline = max(self._deadline, now + IDLE_S)  # it is not the caller's turn, or uvicorn's own timer runs
        elif now >= self._deadline and self._stage == HEAD and not self._ignores_input:
            self._refuse(RequestError(f"the request's head took longer than {HEAD_S:g} s", status=408, code="request_timeout"))
        elif now >= self._deadline:
            self.transport.close()

    def fail(self, exchange: RequestExchange, error: RequestError) -> None:
        """Answer with `error`, or break off an answer that has begun."""
        began = exchange.cycle.response_started
        exchange.drop()
        if began:
            self.transport.close()
        else:
            self._answer_last(_refusal(error, bodiless=exchange.cycle.scope["method"] == "HEAD"))

    def _unanswered(self) -> list[RequestExchange]:
        return [each for each in self._exchanges if not each.is_over]

    def _drop_all(self) -> None:
        for exchange in self._unanswered():
            exchange.drop()

    def _parse(self, data: bytes) -> bytes | None:
        """Parse `data`. Returns what is to be parsed next if the caller offers another protocol, else None.

        We stay with HTTP/1.1: a new parser reads the body of that request, framed by a made-up head.
        """
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
            return None
        except HttpParserUpgrade as offer:
            rest = data[offer.args[0] :]
        framing = [pair for pair in self.scope["headers"] if pair[0] in (b"content-length", b"transfer-encoding")]
        self.parser = HttpRequestParser(self)
        self._skips_head = True
        return b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(b"%b: %b\r\n" % pair for pair in framing), rest)

    def _refuse(self, error: RequestError) -> None:
        """Read no more from this caller. Send it `error`; if earlier requests wait, send the next answer instead and close."""
        self._ignores_input, self._deadline = True, inf
        if len(self._unanswered()) > (self._stage == BODY):
            self.shutdown()
        elif self._stage == BODY:
            self.fail(self._exchanges[-1], error)
        else:
            self._answer_last(_refusal(error))

    def _answer_last(self, answer: bytes) -> None:
        """Send `answer`, then close our side only: a full close while the caller sends would reset the connection and lose it."""
        self._ignores_input, self._deadline = True, self.shared.now + LINGER_S
        if self.transport.is_closing():
            return
        self.transport.write(answer)
        if self.shared.draining:
            self.transport.close()
        else:
            self.transport.write_eof()
            self.flow.resume_reading()


class HttpServer:
    """Serves `app` on a bound socket inside `async with`. On exit, waits up to `drain_s` for open exchanges, then cuts them.

    A caller that takes none of the data ready for it for `reader_s` is disconnected.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, *, drain_s: float, reader_s: float, backlog: int = 4096) -> None:
        self._sock = sock
        self._drain_s = drain_s
        self._sweep_s = min(SWEEP_S, reader_s / 4)
        self._backlog = backlog
        self._shared = HttpServerState(reader_s)
        self._config = Config(
            cast(Any, app),
            http=HttpConnection,
            ws="none",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=IDLE_S,
        )

    async def __aenter__(self) -> Self:
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it; asyncio sets it on some only
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)
        self._listener = await self._loop.create_server(
            lambda: HttpConnection(self._config, self._shared), sock=self._sock, backlog=self._backlog
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._shared.draining = True
        self._listener.close()
        for connection in self._connections():
            connection.shutdown()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._until_over()
        except TimeoutError:
            log.warning("%d calls did not end within %g s of the server's stop and are cut", len(self._shared.tasks), self._drain_s)
        finally:
            await self._cut()
            self._timer.cancel()

    def _connections(self) -> tuple[HttpConnection, ...]:
        return cast("tuple[HttpConnection, ...]", tuple(self._shared.connections))

    def _sweep(self) -> None:
        self._shared.now += self._sweep_s
        for connection in self._connections():
            connection.check(self._shared.now)
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)

    async def _until_over(self) -> None:
        while self._shared.tasks or self._shared.connections:
            if self._shared.tasks:
                await asyncio.wait(tuple(self._shared.tasks))
            else:
                self._shared.lost.clear()
                await self._shared.lost.wait()

    async def _cut(self) -> None:
        """Cancel and abort all. No deadline: a cancelled task may still use resources that are closed after the server."""
        while tasks := tuple(self._shared.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for connection in self._connections():
            connection.transport.abort()
        await self._until_over()
        await self._listener.wait_closed()


def _refusal(error: RequestError, *, bodiless: bool = False) -> bytes:
    """Return a complete answer that ends its connection, with a JSON error in the OpenAI form."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = orjson.dumps({"error": {"message": str(error), "type": kind, "param": None, "code": error.code}})
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + (b"" if bodiless else body)
