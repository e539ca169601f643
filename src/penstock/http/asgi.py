"""Small tools for ASGI apps: headers, bounded request bodies, JSON of bounded size and depth, and calls without a socket.

An agent in the gateway's process calls it through an `httpx` transport, in the gateway's loop. The app sees what it would see from
our HTTP server: the same headers and body, and a callback when the caller leaves.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from contextvars import Context
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address
from typing import Any, cast

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope

from penstock.errors import RequestError

ON_DISCONNECT = "penstock.on_disconnect"
"""In a scope, by our server: called with a function, has that called once the caller leaves; called with None, no longer."""
MAX_JSON_VALUES, MAX_JSON_KEYS = 1_000_000, 200_000
"""In a body, at most: as many as are parsed in about 100 ms. They are counted by commas and colons, those in texts included."""
MAX_JSON_FIELDS = 1000
"""Fields of a body that is an object."""
MAX_JSON_DEPTH = 64
"""Nesting levels; stores and templates recurse."""
Headers = Iterable[tuple[bytes, bytes]]
_HOST = re.compile(r"(?:([A-Za-z0-9._-]{1,255})|\[([0-9A-Fa-f:.]{2,45})\])(?::([0-9]{1,5}))?", re.ASCII)


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The request's body; None where the caller hung up before it was complete."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            raise RequestError(f"the request is larger than {limit} bytes; send less", status=413, code="request_too_large")
    return b"".join(parts)


def check_size(body: bytes) -> None:
    """RequestError 413 if a JSON body holds so many values that parsing it would stall the loop."""
    if len(body) < MAX_JSON_KEYS:
        return
    for mark, most, what in ((b",", MAX_JSON_VALUES, "values (commas)"), (b'":', MAX_JSON_KEYS, "keys")):
        if body.count(mark) > most:
            text = f"the request holds more than {most} {what}; send less, or send it in several requests"
            raise RequestError(text, status=413, code="request_too_large")


class JsonBudget:
    """Counts JSON values while they are read, across several calls; refuses too many, and those that are nested too deep."""

    def __init__(self, most: int, *, depth: int = MAX_JSON_DEPTH) -> None:
        self._most = self._left = most
        self._depth = depth

    def spend(self, value: Any, name: str) -> None:
        """RequestError 400 if `value` is nested too deep, or holds more than is left."""
        level: list[Any] = [value]
        for _ in range(self._depth + 1):
            self._left -= len(level)
            if self._left < 0:
                text = f"{name} holds more than {self._most} JSON values; send less"
                raise RequestError(text, code="invalid_value", param=name)
            level = [item for each in level for item in _items(each)]
            if not level:
                return
        raise RequestError(f"{name} is nested more than {self._depth} levels deep", code="invalid_value", param=name)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is."""
    check_size(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the request body must be a JSON object", code="invalid_json")
    if len(cast("dict[str, Any]", value)) > MAX_JSON_FIELDS:
        raise RequestError(f"the request body has more than {MAX_JSON_FIELDS} fields", code="invalid_value")
    return cast("dict[str, Any]", value)


def header(headers: Headers, name: bytes) -> str:
    """The value of a header; empty where it is absent."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return ""


@lru_cache(maxsize=64)
def host_name(host_header: str) -> str:
    """Return the name or address in a Host header, in lower case; empty if the header is malformed."""
    matched = _HOST.fullmatch(host_header)
    if matched is None or int(matched[3] or 0) > 65535:
        return ""
    if matched[1]:
        return matched[1].lower()
    try:
        return str(IPv6Address(matched[2]))
    except AddressValueError:
        return ""


FAILED, STOPPING = (500, "the server failed; its log says how", "internal_error"), (503, "the server is stopping", "stopping")

log = logging.getLogger(__name__)


def in_process_transport(httpx: Any, app: ASGIApp, loop: asyncio.AbstractEventLoop) -> Any:
    """Makes a transport that calls `app` in `loop`, from any loop; `httpx` is that package, or one of its successors."""

    class AnswerStream(httpx.AsyncByteStream):
        def __init__(self, call: InProcessCall) -> None:
            self._call = call

        def __aiter__(self) -> AsyncGenerator[bytes]:
            return self._call.parts()

        async def aclose(self) -> None:
            self._call.leave()

    class InProcessTransport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any:
            call = InProcessCall(httpx, await request.aread(), request.extensions.get("timeout", {}).get("read"), loop)
            await call.start(app, request)
            return httpx.Response(call.status, headers=call.headers, stream=AnswerStream(call), request=request)

    return InProcessTransport()


class InProcessCall:
    """One call and its answer. `timeout_s` is how long the caller waits for each part of it."""

    def __init__(self, httpx: Any, body: bytes, timeout_s: float | None, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._caller = asyncio.get_running_loop()
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self._httpx = httpx
        self._bodies = deque([body])
        self._timeout_s = timeout_s
        self._parts = deque[bytes]()
        self._started = self._complete = self._left = self._ended = False
        self._changed: asyncio.Future[None] | None = None
        self._on_disconnect: Callable[[], None] | None = None

    async def start(self, app: ASGIApp, request: Any) -> None:
        """Call the app, and wait until its answer begins."""
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": request.url.scheme,
            "method": request.method,
            "path": request.url.path,
            "root_path": "",
            "query_string": request.url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            ON_DISCONNECT: self._notify,
        }
        try:
            # In an empty context: what the gateway does is not the agent's doing.
            _post(self._loop, self._begin, app, scope, context=Context())
            await self._change()
        except BaseException:
            self.leave()
            raise

    async def parts(self) -> AsyncGenerator[bytes]:
        """The body, as it comes."""
        while True:
            while self._parts:
                yield self._parts.popleft()
            if self._complete:
                return
            if self._ended:
                raise self._httpx.RemoteProtocolError("the gateway broke off its answer")
            await self._change()

    def leave(self) -> None:
        """Reports to the app that the caller left, unless its answer is complete."""
        if not self._complete:
            _post(self._loop, self._disconnect)

    # Below, what runs in the app's loop, up to `_deliver` and `_end`

    def _begin(self, app: ASGIApp, scope: Scope) -> None:
        self._task = self._loop.create_task(self._run(app, scope))

    def _disconnect(self) -> None:
        if not self._left:
            self._left = True
            if self._on_disconnect is not None:
                self._on_disconnect()

    def _notify(self, callback: Callable[[], None] | None) -> None:
        """See `ON_DISCONNECT`."""
        self._on_disconnect = callback
        if callback is not None and self._left:
            callback()

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        failure = FAILED
        try:
            await app(scope, self._receive, self._send)
        except asyncio.CancelledError:
            failure = STOPPING
        except Exception as error:
            log.error("the app failed on a %s request", scope["method"], exc_info=error)
        _post(self._caller, self._end, failure)

    async def _change(self) -> None:
        """Wait until the app has sent something more, or is done."""
        if self._ended:
            return
        self._changed = self._caller.create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._changed
        except TimeoutError as cause:
            raise self._httpx.ReadTimeout("the gateway's answer took too long") from cause
        finally:
            self._changed = None

    async def _receive(self) -> Message:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.popleft(), "more_body": False}
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        _post(self._caller, self._deliver, message)

    def _deliver(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message.get("headers", [])
            return
        self._started = True
        self._parts.append(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        self._wake()

    def _end(self, failure: tuple[int, str, str]) -> None:
        if not self._started:
            self.status, message, code = failure
            self.headers = [(b"content-type", b"application/json")]
            self._started = self._complete = True
            self._parts.append(orjson.dumps({"error": {"message": message, "code": code}}))
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: Any, context: Context | None = None) -> None:
    with suppress(RuntimeError):  # the loop is closed: its side of the call has ended
        loop.call_soon_threadsafe(call, *args, context=context)
