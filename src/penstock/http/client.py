"""One request to an engine over HTTP: what it answers, or the fault that kept it from answering."""

import asyncio
import io
import re
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Generic, Literal, Protocol, TypeVar

import aiohttp
import orjson

from penstock.http.sse import SseDecoder

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

CONNECT_S = 5.0
PROBE_S = 10.0
"""For a question that needs no token sampled."""
DRAIN_S = 1.0
"""For what a server sends after the end of a reply; past it the connection is given up."""
KEEPALIVE_S = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn closes its end."""
LARGE_BODY_BYTES = 1 << 20
"""Bytes of a request that are sent piece by piece."""
QUOTED_CHARS = 300
"""Characters of a server's own words that a message quotes."""

ErrorKind = Literal["busy", "broken", "refused", "garbled"]
"""Try later; try elsewhere; the request is at fault; the answer makes no sense."""

_TOO_LONG = re.compile(r"context length|max_model_len|maximum.{0,20}length|too long", re.IGNORECASE)
_BEARER = re.compile(r"(bearer\s+|sk-)[^\s\"',;]+", re.IGNORECASE)


class UpstreamError(Exception):
    """Why one attempt gave no reply, or not all of it. Never leaves the engines."""

    def __init__(self, words: str, *, kind: ErrorKind, retry_after_s: float = 0.0, status: int = 0) -> None:
        super().__init__(words)
        self.kind: ErrorKind = kind
        self.retry_after_s = retry_after_s
        """What the server asked for."""
        self.status = status
        """Of the answer; 0 where there was none."""


class EventReader(Protocol[T_co]):
    """Makes chunks of the events of one reply."""

    done: bool
    """Whether the reply has said how it finished."""

    def take(self, event: bytes) -> None:
        """Add an event; Fault where it makes no sense."""
        ...

    def drain(self) -> T_co | None:
        """What was added since the last call; None where that is nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeouts:
    """How long an engine may be silent."""

    first_token_s: float = 300.0
    """Before the first token, waiting in the engine's queue included."""
    stall_s: float = 120.0
    """Between two tokens."""


class CancelHandle:
    """By which a request is called back from outside. What was read before is kept; nothing that comes later is."""

    def __init__(self) -> None:
        self.pulled = False
        self._clock: asyncio.Timeout | None = None
        self._response: aiohttp.ClientResponse | None = None

    def pull(self) -> None:
        """Hang up, now: whoever waits for the request's next event waits no longer."""
        self.pulled = True
        if self._response is not None:
            self._response.close()
        if self._clock is not None and not self._clock.expired():
            self._clock.reschedule(asyncio.get_running_loop().time())

    def hold(self, response: aiohttp.ClientResponse) -> None:
        """The connection that is to be closed."""
        self._response = response

    @asynccontextmanager
    async def wait(self, limit_s: float) -> AsyncGenerator[None]:
        """TimeoutError after so long, or once the leash is pulled."""
        try:
            async with asyncio.timeout(0.0 if self.pulled else limit_s) as self._clock:
                yield
        finally:
            self._clock = None


class HttpClient:
    """The connections to all engines of a fleet. Opened by the first request, in its event loop."""

    def __init__(self, timers: RequestTimeouts, *, key: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._timers = timers
        self._key = key
        bearer = {"authorization": f"Bearer {key}"} if key else {}
        self._headers = {"content-type": "application/json", **(bearer if headers is None else headers)}
        """Of every request; the key goes as a bearer token where nothing else is said."""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Break off what is running."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, url: str, body: dict[str, Any] | None = None, *, limit_s: float | None = None) -> Any:
        """A short question, by GET, or by POST where it has a body; the answer as JSON, None where it is empty."""
        limit = limit_s or (PROBE_S if body is None else self._timers.first_token_s)
        with self._faults(url, limit):
            async with asyncio.timeout(limit):
                response = await self._send(url, None if body is None else orjson.dumps(body))
                text = await response.read()
        try:
            return orjson.loads(text) if text else None
        except orjson.JSONDecodeError as cause:
            raise UpstreamError(f"{url} answered with something that is not JSON: {self._quote(text)}", kind="garbled") from cause

    async def stream(self, url: str, body: bytes, reader: EventReader[T], leash: CancelHandle) -> AsyncGenerator[T, None]:
        """Post `body` and give the reply's chunks as they come. Closing the generator closes the connection at once.

        A Fault ends it where the leash was pulled: which one says nothing.
        """
        limit, response = self._timers.first_token_s, None
        try:
            with self._faults(url, limit):
                async with leash.wait(limit):
                    response = await self._send(url, body)
                    leash.hold(response)
                    incoming = ResponseStream(response, reader)
                    chunk = await incoming.next()
            while not reader.done:
                yield chunk
                with self._faults(url, self._timers.stall_s):
                    async with leash.wait(self._timers.stall_s):
                        chunk = await incoming.next()
            await incoming.drain()
            yield chunk
        finally:
            if response is not None:
                response.close()

    async def _send(self, url: str, body: bytes | None) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = self._open()
        method = "GET" if body is None else "POST"
        data = io.BytesIO(body) if body and len(body) > LARGE_BODY_BYTES else body
        response = await self._session.request(method, url, data=data, allow_redirects=False)
        if response.status != 200:
            try:
                raise self._refusal(url, response, await _beginning(response))
            finally:
                response.close()
        return response

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )

    def _refusal(self, url: str, response: aiohttp.ClientResponse, body: bytes) -> UpstreamError:
        status, words = response.status, self._quote(_message(body))
        said = f"{url} answered {status} {response.reason}{f': {words}' if words else ''}"
        if status in (429, 503):
            return UpstreamError(said, kind="busy", retry_after_s=retry_after_s(response.headers.get("retry-after")), status=status)
        if status >= 500 or status in (401, 403, 404):  # it served us before: these say that it is another server now
            return UpstreamError(said, kind="broken", status=status)
        if status == 400 and _TOO_LONG.search(words):
            said += "; the prompt and max_tokens do not fit into this server's context: shorten one of them"
        return UpstreamError(said, kind="refused", status=status)

    @contextmanager
    def _faults(self, url: str, limit_s: float) -> Generator[None]:
        """Name the address in whatever goes wrong inside."""
        try:
            yield
        except aiohttp.ClientError as cause:
            raise UpstreamError(f"{url}: {self._quote(str(cause)) or type(cause).__name__}", kind="broken") from cause
        except TimeoutError as cause:
            raise UpstreamError(f"{url} was silent for {limit_s:g} s", kind="broken") from cause
        except OSError as cause:
            raise UpstreamError(f"{url}: {cause}", kind="broken") from cause
        except UpstreamError as fault:
            if str(fault).startswith(url):
                raise
            raise UpstreamError(f"{url} {self._quote(str(fault))}", kind=fault.kind, status=fault.status) from fault

    def _quote(self, text: str | bytes) -> str:
        """A server's words on one line, without our key, and not too many."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        plain = _BEARER.sub(r"\1…", text.replace(self._key, "…") if self._key else text)
        line = " ".join(plain.split())
        return line if len(line) <= QUOTED_CHARS else f"{line[:QUOTED_CHARS]}…"


class ResponseStream(Generic[T]):
    """The reply on an open connection. What came before a fault is given out before the fault is."""

    def __init__(self, response: aiohttp.ClientResponse, reader: EventReader[T]) -> None:
        self._response = response
        self._reader = reader
        self._events = SseDecoder()
        self._fault: UpstreamError | None = None

    async def next(self) -> T:
        """All that has come since the last call, at least one token or the end."""
        while (chunk := self._reader.drain()) is None:
            if self._fault is not None:
                raise self._fault
            await self._fill()
        return chunk

    async def drain(self) -> None:
        """Read what follows the end, so that the connection can serve again."""
        with suppress(aiohttp.ClientError, OSError, RuntimeError):
            async with asyncio.timeout(DRAIN_S):
                while await self._response.content.readany():
                    pass

    async def _fill(self) -> None:
        try:
            if self._response.content_type == "application/json":  # no stream after all: the reply is one event
                self._reader.take(await self._response.content.read())
                return
            piece = await self._response.content.readany()
            if not piece:
                raise UpstreamError("ended without saying how the reply finished", kind="broken")
            for event in self._events.feed(piece):
                self._reader.take(event)
        except RuntimeError:  # how aiohttp says that the connection was lost between two of its own waits
            self._fault = UpstreamError("hung up in the middle of the reply", kind="broken")
        except ValueError as cause:
            self._fault = UpstreamError(str(cause), kind="garbled")
        except UpstreamError as fault:
            self._fault = fault


def retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, given as a number or as a date; 0 where it says nothing."""
    if not header:
        return 0.0
    with suppress(ValueError):
        seconds = float(header)
        return seconds if 0.0 <= seconds < float("inf") else 0.0
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """As much of an error's body as is worth reading."""
    body = b""
    while len(body) < 1 << 14 and (piece := await response.content.readany()):
        body += piece
    return body


def _message(body: bytes) -> str | bytes:
    """The sentence in an OpenAI-style error body; the whole body where it has another form."""
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):
        error: dict[str, Any] | str = orjson.loads(body)["error"]
        text = error if isinstance(error, str) else error["message"]
        if isinstance(text, str):
            return text
    return body
