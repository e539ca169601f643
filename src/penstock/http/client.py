"""HTTP client for engines: JSON requests, streamed replies, and one exception for all failures."""

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
"""Timeout of a GET, which samples no token."""
DRAIN_S = 1.0
"""Longest time to read what a server sends after the end of a reply, before closing the connection."""
KEEPALIVE_S = 4.0
"""Lifetime of an idle connection: less than the 5 s after which uvicorn closes its end."""
LARGE_BODY_BYTES = 1 << 20
"""Larger request bodies are sent in pieces: aiohttp writes a bytes body in one blocking call."""
QUOTED_CHARS = 300
"""Most characters of a server's answer that an error message quotes."""

ErrorKind = Literal["busy", "broken", "refused", "garbled"]
"""`busy`: try later. `broken`: try another server. `refused`: the request is wrong. `garbled`: the answer cannot be understood."""

_TOO_LONG = re.compile(r"context length|max_model_len|maximum.{0,20}length|too long", re.IGNORECASE)
_BEARER = re.compile(r"(bearer\s+|sk-)[^\s\"',;]+", re.IGNORECASE)


class UpstreamError(Exception):
    """A request got no reply, or only part of one. Engines catch it; it is not part of the public error tree."""

    def __init__(self, text: str, *, kind: ErrorKind, retry_after_s: float = 0.0, status: int = 0) -> None:
        super().__init__(text)
        self.kind: ErrorKind = kind
        self.retry_after_s = retry_after_s
        """From the Retry-After header."""
        self.status = status
        """HTTP status; 0 if there was no answer."""


class EventReader(Protocol[T_co]):
    """Turns the events of one reply into chunks."""

    done: bool
    """Whether the reply has said how it finished."""

    def feed(self, event: bytes) -> None:
        """Add an event; UpstreamError if it cannot be understood."""
        ...

    def take_chunk(self) -> T_co | None:
        """Return what was added since the last call, or None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeouts:
    first_token_s: float = 300.0
    """Longest wait for the first token, including the time in the engine's queue."""
    stall_s: float = 120.0
    """Longest silence between two tokens."""


class CancelHandle:
    """Cancels one streamed request from outside its task. Chunks already read are kept; nothing more is read."""

    def __init__(self) -> None:
        self.cancelled = False
        self._timeout: asyncio.Timeout | None = None
        self._response: aiohttp.ClientResponse | None = None

    def cancel(self) -> None:
        """Close the connection and wake the task that waits for the next event."""
        self.cancelled = True
        if self._response is not None:
            self._response.close()
        # Before the headers arrive there is no response to close; expiring the timeout wakes the waiting task in both cases.
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def attach(self, response: aiohttp.ClientResponse) -> None:
        """Set the connection that `cancel` closes."""
        self._response = response

    @asynccontextmanager
    async def timeout(self, limit_s: float) -> AsyncGenerator[None]:
        """Raise TimeoutError after `limit_s`, or at once when the request is cancelled."""
        try:
            async with asyncio.timeout(0.0 if self.cancelled else limit_s) as self._timeout:
                yield
        finally:
            self._timeout = None


class HttpClient:
    """The connection pool of one engine. The session is opened by the first request, in that request's event loop."""

    def __init__(self, timeouts: RequestTimeouts, *, key: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._timeouts = timeouts
        self.key = key
        bearer = {"authorization": f"Bearer {key}"} if key else {}
        self._headers = {"content-type": "application/json", **(bearer if headers is None else headers)}
        """Sent with every request. Without `headers`, the key is sent as a bearer token."""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the session and break off running requests."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request_json(self, url: str, body: dict[str, Any] | None = None, *, limit_s: float | None = None) -> Any:
        """GET `url`, or POST `body` to it; return the answer parsed as JSON, or None if it is empty."""
        text = await self.request_bytes(url, body, limit_s=limit_s)
        try:
            return orjson.loads(text) if text else None
        except orjson.JSONDecodeError as cause:
            raise UpstreamError(f"{url} answered with something that is not JSON: {self._quote(text)}", kind="garbled") from cause

    async def request_bytes(self, url: str, body: dict[str, Any] | None = None, *, limit_s: float | None = None) -> bytes:
        """`request_json`, with the answer as it is."""
        limit = limit_s or (PROBE_S if body is None else self._timeouts.first_token_s)
        with self._errors(url, limit):
            async with asyncio.timeout(limit):
                response = await self._send(url, None if body is None else orjson.dumps(body))
                return await response.read()

    async def stream(self, url: str, body: bytes, reader: EventReader[T], handle: CancelHandle) -> AsyncGenerator[T, None]:
        """POST `body` and yield the reply's chunks as they arrive. Closing the generator closes the connection.

        A cancelled request ends with an UpstreamError whose text and kind mean nothing; check `handle.cancelled`.
        """
        limit, response = self._timeouts.first_token_s, None
        try:
            with self._errors(url, limit):
                async with handle.timeout(limit):
                    response = await self._send(url, body)
                    handle.attach(response)
                    incoming = ResponseStream(response, reader)
                    chunk = await incoming.next()
            while not reader.done:
                yield chunk
                with self._errors(url, self._timeouts.stall_s):
                    async with handle.timeout(self._timeouts.stall_s):
                        chunk = await incoming.next()
            # Drain before the last chunk: the caller may close this generator as soon as it has that chunk.
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
                raise self._status_error(url, response, await _read_error_body(response))
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

    def _status_error(self, url: str, response: aiohttp.ClientResponse, body: bytes) -> UpstreamError:
        status, quoted = response.status, self._quote(_error_message(body))
        text = f"{url} answered {status} {response.reason}{f': {quoted}' if quoted else ''}"
        if status in (429, 503):
            wait_s = retry_after_s(response.headers.get("retry-after"))
            return UpstreamError(text, kind="busy", retry_after_s=wait_s, status=status)
        # 401, 403, 404: this URL and key worked when the engine was opened, so another server must answer there now.
        if status >= 500 or status in (401, 403, 404):
            return UpstreamError(text, kind="broken", status=status)
        if status == 400 and _TOO_LONG.search(quoted):
            text += "; the prompt and max_tokens do not fit into this server's context: shorten one of them"
        return UpstreamError(text, kind="refused", status=status)

    @contextmanager
    def _errors(self, url: str, limit_s: float) -> Generator[None]:
        """Turn errors of aiohttp, asyncio and the system into an UpstreamError that names `url`."""
        try:
            yield
        except aiohttp.ClientError as cause:
            raise UpstreamError(f"{url}: {self._quote(str(cause)) or type(cause).__name__}", kind="broken") from cause
        except TimeoutError as cause:
            raise UpstreamError(f"{url} was silent for {limit_s:g} s", kind="broken") from cause
        except OSError as cause:
            raise UpstreamError(f"{url}: {cause}", kind="broken") from cause
        except UpstreamError as error:
            if str(error).startswith(url):
                raise
            wait_s = error.retry_after_s
            raise UpstreamError(
                f"{url} {self._quote(str(error))}", kind=error.kind, retry_after_s=wait_s, status=error.status
            ) from error

    def _quote(self, text: str | bytes) -> str:
        """Return a server's text on one line, shortened, without our key or anything like a key."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        plain = _BEARER.sub(r"\1…", text.replace(self.key, "…") if self.key else text)
        line = " ".join(plain.split())
        return line if len(line) <= QUOTED_CHARS else f"{line[:QUOTED_CHARS]}…"


class ResponseStream(Generic[T]):
    """Reads the chunks of one response. An error is raised only after all chunks before it were returned."""

    def __init__(self, response: aiohttp.ClientResponse, reader: EventReader[T]) -> None:
        self._response = response
        self._reader = reader
        self._decoder = SseDecoder()
        self._error: UpstreamError | None = None

    async def next(self) -> T:
        """Return all that arrived since the last call; wait for at least one token or the end."""
        while (chunk := self._reader.take_chunk()) is None:
            if self._error is not None:
                raise self._error
            await self._fill()
        return chunk

    async def drain(self) -> None:
        """Read the rest of the response: aiohttp reuses a connection only if its response was read to the end."""
        with suppress(aiohttp.ClientError, OSError, RuntimeError):
            async with asyncio.timeout(DRAIN_S):
                while await self._response.content.readany():
                    pass

    async def _fill(self) -> None:
        try:
            if self._response.content_type == "application/json":  # not streamed: the whole reply is one event
                self._reader.feed(await self._response.content.read())
                return
            piece = await self._response.content.readany()
            if not piece:
                raise UpstreamError("ended without saying how the reply finished", kind="broken")
            for event in self._decoder.feed(piece):
                self._reader.feed(event)
        except RuntimeError:  # raised by aiohttp if the connection was lost between two reads
            self._error = UpstreamError("hung up in the middle of the reply", kind="broken")
        except ValueError as cause:
            self._error = UpstreamError(str(cause), kind="garbled")
        except UpstreamError as error:
            self._error = error


def retry_after_s(header: str | None) -> float:
    """Return the seconds to wait by a Retry-After header, a number or a date; 0 if it is missing or invalid."""
    if not header:
        return 0.0
    with suppress(ValueError):
        seconds = float(header)
        return seconds if 0.0 <= seconds < float("inf") else 0.0
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0


async def _read_error_body(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    while len(body) < 1 << 14 and (piece := await response.content.readany()):
        body += piece
    return body


def _error_message(body: bytes) -> str | bytes:
    """Return the message of an OpenAI-style error body, or the whole body if it has another form."""
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):
        error: dict[str, Any] | str = orjson.loads(body)["error"]
        text = error if isinstance(error, str) else error["message"]
        if isinstance(text, str):
            return text
    return body
