"""Calls of the gateway by agents in its process, without a socket: an `httpx` transport that calls the ASGI app in its loop.

The app sees what it would see from our HTTP server: the same headers and body, and a callback when the caller leaves.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Scope

from penstock.http.asgi import ON_DISCONNECT

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
