"""An HTTP/1.1 server for an ASGI app, with as little as possible between the socket and the app."""

import asyncio
import logging
import socket
import struct
from collections import deque
from math import inf
from types import TracebackType
from typing import Self, cast

from penstock.errors import RequestError
from penstock.http import http_parser
from penstock.http.http_parser import Intake
from penstock.http.request_cycle import BODY, App, Exchange, refusal

SWEEP_S = 1.0
"""How often callers are looked after, at most; one timer does it for all, so that a request sets none of its own."""

log = logging.getLogger(__name__)


UNREAD_BYTES = 256 * 1024
"""Of a body that its app has not asked for; above it, the socket is read no further."""
UNSENT_BYTES = 64 * 1024
"""Of a stream's parts that are put together before they are written, at most."""
AHEAD = 16
"""Requests that wait for the answer to an earlier one, before the socket is read no further."""
AHEAD_AT_MOST = 256
IDLE_S = 120.0
"""Longer than clients keep an idle connection: one that we close first may be just then in use again."""
LINGER_S = 5.0
"""How long a caller who is refused in the middle of sending may go on, so that it gets to read why."""


class Hub:
    """What the connections of one server share."""

    def __init__(self, app: App, reader_s: float) -> None:
        self.app = app
        self.reader_s = reader_s
        self.now = 0.0
        """Seconds, counted look by look at all connections: it stands still while the loop is blocked, which no caller can help."""
        self.draining = False
        self.over = asyncio.Event()
        """Set when it drains and everything has ended."""
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.buffer = memoryview(bytearray(http_parser.READ_BYTES))
        """Every socket is read into this one, and what was read is parsed at once: a new buffer for each read can cost more."""
        self._unsent: list[Connection] = []

    def left(self) -> None:
        """A task or a connection has ended."""
        if self.draining and not self.tasks and not self.connections:
            self.over.set()

    def flush_soon(self, connection: "Connection", loop: asyncio.AbstractEventLoop) -> None:
        """Write what it has put together at the end of this turn of the loop."""
        if not self._unsent:
            loop.call_soon(self._flush)
        self._unsent.append(connection)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            connection.flush()


class Connection(asyncio.BufferedProtocol):
    """The transport calls it for what comes, its exchanges for what goes."""

    __slots__ = (
        "_ahead", "_current", "_deaf", "_held", "_hub", "_intake", "_loop", "_paused", "_taken", "_taken_at",
        "_unsent", "_unsent_bytes", "_writable", "_written", "transport",
    )  # fmt: skip

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
        self.transport: asyncio.Transport
        self._intake: Intake
        self._hub = hub
        self._loop = loop
        self._current: Exchange | None = None
        """Whose answer is being written."""
        self._ahead: deque[Exchange | bytes] = deque()
        """What follows the current one; bytes are a refusal, after which nothing is said."""
        self._deaf = False
        """What comes is thrown away."""
        self._held = False
        """The socket is not read, for the app is behind."""
        self._paused = False
        """The caller is behind."""
        self._writable = asyncio.Event()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._written = self._taken = 0
        """Bytes given to the transport, and how many of them the caller had taken when last looked at."""
        self._taken_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; see `asyncio.BufferedProtocol` for this and the next."""
        self.transport = cast(asyncio.Transport, transport)
        sock: socket.socket = transport.get_extra_info("socket")
        addresses: dict[str, object] = {"client": None, "server": None}
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            names = {"client": "peername", "server": "sockname"}
            addresses = {key: (transport.get_extra_info(name) or ("", 0))[:2] for key, name in names.items()}
        self._intake = Intake(self, self._hub, addresses)
        self._hub.connections.add(self)
        if self._hub.draining:
            transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._hub.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse; refuse what cannot be parsed."""
        if self._deaf:
            return
        try:
            self._intake.feed(self._hub.buffer[:nbytes])
        except RequestError as error:
            self._refuse(error)
        self._regulate()

    def eof_received(self) -> bool:
        """The caller says no more; whether it listens cannot be known. Its app hears that it left, and may still answer."""
        self._deaf = True
        self._intake.deadline = inf
        for exchange in self._exchanges():
            exchange.hang_up()
        return self._current is not None or bool(self._ahead)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop what the apps still say."""
        self._deaf = True
        for exchange in self._exchanges():
            exchange.cut()
        self._current = None
        self._ahead.clear()
        self._unsent.clear()
        self._intake.close()
        self._writable.set()
        self._hub.connections.discard(self)
        self._hub.left()

    def pause_writing(self) -> None:
        self._paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let them go on."""
        self._paused = False
        self._writable.set()
        self._advance()

    def take(self, exchange: Exchange) -> None:
        """Start it, or let it wait for its turn."""
        if self._current is None and not self._ahead and not self._paused:
            self._start(exchange)
        elif len(self._ahead) < AHEAD_AT_MOST:
            self._ahead.append(exchange)
        else:
            raise RequestError(
                f"more than {AHEAD_AT_MOST} requests came ahead of their answers; wait for some", code="too_far_ahead"
            )

    @property
    def last(self) -> bool:
        return self._hub.draining or (self._deaf and not self._ahead)

    def put(self, part: bytes) -> asyncio.Event | None:
        """Write more of a stream, together with all that comes in the same turn of the loop."""
        if not self._unsent:
            self._hub.flush_soon(self, self._loop)
        self._unsent.append(part)
        self._unsent_bytes += len(part)
        if self._unsent_bytes > UNSENT_BYTES:
            self.flush()
        return self._writable if self._paused else None

    def write(self, part: bytes) -> None:
        """Write at once, behind what was put."""
        if self._unsent:
            self._unsent.append(part)
            self.flush()
        else:
            self._written += len(part)
            self.transport.write(part)

    def flush(self) -> None:
        """Write what was put."""
        if self._unsent:
            part = b"".join(self._unsent)
            self._unsent.clear()
            self._unsent_bytes = 0
            self._written += len(part)
            self.transport.write(part)

    def read_on(self) -> None:
        """Read the socket again, if it was held."""
        if self._held:
            self._regulate()

    def answered(self, exchange: Exchange) -> None:
        """Go on, or end."""
        self._current = None
        if exchange.keep and not self._hub.draining:
            self._advance()
        else:
            self._end(exchange)

    def failed(self, exchange: Exchange) -> None:
        """Say so, or break off in a way that is not taken for a whole answer."""
        began = exchange.phase == BODY
        exchange.cut()
        self._current = None
        if began and exchange.until_closed:  # a plain end would make it whole
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        elif began or exchange.gone:
            self.flush()
            self.transport.close()
        else:
            failure = RequestError("the server failed; its log says how", status=500, code="internal_error")
            stopping = RequestError("the server is stopping", status=503, code="stopping")
            self.write(refusal(stopping if self._hub.draining else failure, bodiless=exchange.scope["method"] == "HEAD"))
            self._end(exchange)

    def ended(self, exchange: Exchange) -> None:
        if exchange.task is not None:
            self._hub.tasks.discard(exchange.task)
        self._hub.left()

    def drain(self) -> None:
        """Take no more requests, and close once there is nothing to answer."""
        if self._current is None:
            self.transport.close()

    def check(self, now: float) -> None:
        """Look after a caller that is too slow to listen or to speak."""
        waiting = self.transport.get_write_buffer_size()
        if not waiting or self._written - waiting != self._taken:
            self._taken, self._taken_at = self._written - waiting, now
        elif now - self._taken_at > self._hub.reader_s:
            self.transport.abort()
            return
        if now < self._intake.deadline:
            return
        if self._held:
            self._intake.deadline = now + http_parser.BODY_S
        elif self._intake.stage == http_parser.NEXT and not self._deaf:
            self.transport.close()
        elif self._intake.stage == http_parser.HEAD and not self._deaf:
            text = f"the request's head took longer than {http_parser.HEAD_S:g} s"
            self._refuse(RequestError(text, status=408, code="request_timeout"))
        else:
            self.transport.abort()

    def _exchanges(self) -> list[Exchange]:
        every = (self._current, *self._ahead)
        return [each for each in every if isinstance(each, Exchange)]

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        exchange.task = self._loop.create_task(exchange.run(self._hub.app))
        self._hub.tasks.add(exchange.task)

    def _advance(self) -> None:
        """Go on to what follows the last answer."""
        if self._current is not None or self._paused or self.transport.is_closing():
            return
        if self._ahead:
            following = self._ahead.popleft()
            if isinstance(following, Exchange):
                self._start(following)
            else:
                self._say_last(following)
        elif self._deaf:
            self.transport.close()
        elif self._intake.stage == http_parser.NEXT:
            self._intake.deadline = self._hub.now + IDLE_S
        self._regulate()

    def _regulate(self) -> None:
        """Read the socket where what was read is wanted."""
        incoming = self._intake.incoming
        behind = len(self._ahead) > AHEAD or (incoming is not None and incoming.unread > UNREAD_BYTES)
        if behind != self._held and not self._deaf:
            self._held = behind
            (self.transport.pause_reading if behind else self.transport.resume_reading)()

    def _refuse(self, error: RequestError) -> None:
        """Say why nothing more is taken from this caller, after the answers that it is owed."""
        self._deaf = True
        self._intake.deadline = inf
        broken, self._intake.incoming = self._intake.incoming, None
        if broken is not None and broken is self._current:
            self._current = None
            began = broken.phase == BODY
            broken.cut()
            if began:
                self.transport.close()
                return
        elif broken is not None and self._ahead:
            self._ahead.pop()
        if self._current is None and not self._ahead:
            self._say_last(refusal(error))
        else:
            self._ahead.append(refusal(error))

    def _say_last(self, answer: bytes) -> None:
        self.write(answer)
        self._linger()

    def _end(self, exchange: Exchange) -> None:
        self._ahead.clear()
        if exchange.complete or exchange.gone:
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Say no more, but let the caller finish: a socket that is closed while it sends would take the answer from it."""
        self._deaf = True
        self._intake.deadline = self._hub.now + LINGER_S
        if self._hub.draining or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        if self._held:
            self._held = False
            self.transport.resume_reading()


class HttpServer:
    """Serves `app` on a bound socket while the `async with` lasts; leaving it lets exchanges end for up to `drain_s`.

    A caller who takes nothing of what is ready for it for `reader_s` is cut off.
    """

    def __init__(self, app: App, sock: socket.socket, *, drain_s: float, reader_s: float, backlog: int = 4096) -> None:
        self._sock = sock
        self._drain_s = drain_s
        self._sweep_s = min(SWEEP_S, reader_s / 4)
        self._backlog = backlog
        self._hub = Hub(app, reader_s)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)
        self._listener = await self._loop.create_server(self._connection, sock=self._sock, backlog=self._backlog)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hub.draining = True
        self._listener.close()
        for connection in tuple(self._hub.connections):
            connection.drain()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._until_over()
        except TimeoutError:
            log.warning("%d calls did not end within %g s of the server's stop and are cut", len(self._hub.tasks), self._drain_s)
        finally:
            await self._cut()
            self._timer.cancel()

    def _connection(self) -> Connection:
        return Connection(self._hub, self._loop)

    def _sweep(self) -> None:
        self._hub.now += self._sweep_s
        for connection in tuple(self._hub.connections):
            connection.check(self._hub.now)
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)

    async def _until_over(self) -> None:
        self._hub.left()
        await self._hub.over.wait()

    async def _cut(self) -> None:
        """Without a deadline: a task that is cancelled may still use what is closed after the server."""
        while tasks := tuple(self._hub.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for connection in tuple(self._hub.connections):
            connection.transport.abort()
        await self._until_over()
        await self._listener.wait_closed()
