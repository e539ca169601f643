"""One HTTP request and its answer, as an ASGI app sees them: what it is given to read, and how what it says goes over the wire."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import orjson
from httptools import parse_url

from penstock.errors import RequestError

Message = MutableMapping[str, Any]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
Address = tuple[str, int]

# How far an answer is. HEAD: begun, with nothing written, as its head goes out with the first of its body. CUT: nobody reads it.
SILENT, HEAD, BODY, OVER, CUT = range(5)

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection"))
_CLOSE = b"connection: close\r\n"

LEAVING = "penstock.when_left"
"""Where an app finds `Exchange.when_left` in its scope."""

log = logging.getLogger(__name__)


class Line(Protocol):
    """The connection that an exchange is on."""

    @property
    def last(self) -> bool:
        """No other request is taken after this one."""
        ...

    def put(self, part: bytes) -> asyncio.Event | None:
        """Write soon; where the caller does not keep up, what to wait for."""
        ...

    def write(self, part: bytes) -> None: ...

    def read_on(self) -> None:
        """What was read is taken."""
        ...

    def answered(self, exchange: "Exchange") -> None:
        """The answer is whole."""
        ...

    def failed(self, exchange: "Exchange") -> None:
        """The app is done, and the answer is not whole."""
        ...

    def ended(self, exchange: "Exchange") -> None:
        """The app is done."""
        ...


class Exchange:
    """Made when the request's head is there; `run` is the task that lets the app answer it."""

    __slots__ = (
        "_chunked", "_expects", "_head", "_left", "_line", "_parts", "_told", "_waiting", "_when_left", "_wordless",
        "complete", "gone", "keep", "phase", "scope", "task", "unread", "until_closed",
    )  # fmt: skip

    def __init__(self, line: Line, scope: dict[str, Any], *, keep: bool, expects: bool) -> None:
        self.scope = scope
        self.phase = SILENT
        self.keep = keep
        """Whether the connection goes on after this answer."""
        self.complete = False
        """Whether the whole body is here."""
        self.gone = False
        """Whether the caller says no more."""
        self.unread = 0
        self.until_closed = False
        """Whether only the connection's end tells that of the answer."""
        self.task: asyncio.Task[None] | None = None
        self._line = line
        self._parts: list[bytes] = []
        self._told = False
        self._expects = expects
        self._waiting: list[asyncio.Future[None]] = []
        self._when_left: Callable[[], None] | None = None
        scope[LEAVING] = self.when_left
        self._head = b""
        self._chunked = False
        self._wordless = False
        self._left = 0

    async def run(self, app: App) -> None:
        """Let the app answer. What it raises is logged, never its words or the target: they may hold secrets."""
        try:
            await app(self.scope, self.receive, self.send)
            if self.phase < OVER and not self.gone:
                log.error("the app left a %s request without a whole answer", self.scope["method"])
        except Exception as error:
            log.error("the app failed on a %s request", self.scope["method"], exc_info=error)
        finally:
            if self.phase < OVER:
                self._line.failed(self)
            self._line.ended(self)

    async def receive(self) -> Message:
        """What the request holds that was not told yet; once there is no more, wait until the caller leaves or is answered."""
        while self.phase < OVER:
            if self._parts or self.complete > self._told:
                return self._take()
            if self.gone:
                break
            if self._expects and self.phase == SILENT and not self.complete:
                self._line.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects = False
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take what the app answers; dropped when nobody is there."""
        phase, kind = self.phase, message["type"]
        if kind == "http.response.body" and HEAD <= phase <= BODY:
            more: bool = message.get("more_body", False)
            part = self._frame(message.get("body", b""), more)
            if phase == HEAD:
                part = self._head + part
                self.phase = BODY
            if not more:
                self._finish(part)
            elif part and (behind := self._line.put(part)) is not None:
                await behind.wait()
        elif phase == CUT:
            await asyncio.sleep(0)  # an app that only talks lets others run
        elif kind == "http.response.start" and phase == SILENT:
            self._begin(message["status"], message.get("headers", ()))
            self.phase = HEAD
        else:
            raise RuntimeError(f"the app sent {kind} when its answer was at {phase}")

    def grow(self, part: bytes) -> None:
        """Take more of the body."""
        self._parts.append(part)
        self.unread += len(part)
        self.wake()

    def wake(self) -> None:
        """Let a waiting app look again."""
        if self._waiting:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiting.clear()

    def hang_up(self) -> None:
        """The caller says no more; it may still listen."""
        self.gone = True
        self.wake()
        self._tell_left()

    def cut(self) -> None:
        """Drop what the app still says."""
        self.phase = CUT
        self.wake()
        self._tell_left()

    def when_left(self, call: Callable[[], None] | None) -> None:
        """Have `call` called once the caller leaves, or no longer: for an app that would only wait to `receive` that."""
        self._when_left = call
        if self.gone or self.phase == CUT:
            self._tell_left()

    def _tell_left(self) -> None:
        call, self._when_left = self._when_left, None
        if call is not None:
            call()

    def _take(self) -> Message:
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self.unread = 0
        self._told = self.complete
        self._line.read_on()
        return {"type": "http.request", "body": body, "more_body": not self.complete}

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Make the head. How the body is framed is decided here; the app's word on it goes for the length alone."""
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        length: int | None = None
        for name, value in headers:
            name = name.lower()
            if name in _FRAMING:
                if name == b"connection":
                    self.keep = self.keep and b"close" not in value.lower()
                if name != b"content-length":
                    continue
                length = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        self._wordless = self.scope["method"] == "HEAD" or status in (204, 304)
        if length is not None or self._wordless:
            self._left = length or 0
        elif self.scope["http_version"] == "1.1":
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            self.until_closed = True
        if not self.keep or not self.complete or self._line.last:
            self.keep = False
            lines.append(_CLOSE)
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        if self._head.count(b"\n") != len(lines) or self._head.count(b"\r") != len(lines):
            raise ValueError("a header of the answer holds a line break")

    def _frame(self, body: bytes, more: bool) -> bytes:
        if self._chunked:
            if more:
                return b"%x\r\n" % len(body) + body + b"\r\n" if body else b""
            return b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n" if body else b"0\r\n\r\n"
        if self._wordless:
            return b""
        if not self.until_closed:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError(
                    f"the answer is {abs(self._left)} bytes {'short' if self._left > 0 else 'long'} of its content-length"
                )
        return body

    def _finish(self, part: bytes) -> None:
        self.phase = OVER
        self._line.write(part)
        self.wake()
        self._line.answered(self)


def make_scope(method: str, version: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Of ASGI, without the addresses."""
    raw_path, query = _split(target)
    path = raw_path.decode("latin-1")
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": version,
        "method": method,
        "scheme": "http",
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
    }


def _split(target: bytes) -> tuple[bytes, bytes]:
    """The path and the query of a request's target."""
    if target[:1] == b"/":
        if b"#" in target:
            target = target.partition(b"#")[0]
        path, _, query = target.partition(b"?")
        return path, query
    if target == b"*":
        return target, b""
    url = parse_url(target)
    if url.schema not in (b"http", b"https"):
        raise RequestError("the request's target is no path", code="malformed_request")
    return url.path or b"/", url.query or b""


def refusal(error: RequestError, *, bodiless: bool = False) -> bytes:
    """A whole answer, the last on its connection: one line of JSON in the form of the OpenAI API."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = orjson.dumps({"error": {"message": str(error), "type": kind, "param": None, "code": error.code}})
    head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n" % (_STATUS_LINES[error.status], len(body), _CLOSE)
    return head if bodiless else head + body
