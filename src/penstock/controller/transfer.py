"""One HTTP exchange with a controller: JSON both ways, a file sent, a file fetched; whatever fails is a ControllerError."""

import http.client
import os
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

import orjson

from penstock.errors import ConfigError, ControllerError

CHUNK = 256 * 1024
FILE_TIMEOUT_S = 300.0
PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Between the attempts at a file."""
PASSING = frozenset({429, 500, 502, 503, 504})
"""Statuses after which a file is tried again."""

T = TypeVar("T")
Progress = Callable[[str, int, int | None], None]
"""Is told a stage, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What is asked of whom."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def send(exchange: Exchange, body: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0) -> dict[str, Any]:
    """Send JSON and return the object that came back; an empty reply is `{}`."""
    content = None if body is None else orjson.dumps(body)
    typed = dict(exchange.headers) | ({} if content is None else {"content-type": "application/json"})
    with _answered(exchange, content, typed, timeout_s=timeout_s) as response:
        return _object(exchange, response.status, _read(exchange, response))


def put_file(
    url: str, path: Path, headers: Mapping[str, str], progress: Progress | None = None, *, stage: str = ""
) -> dict[str, Any]:
    """PUT a file as it is on disk, again after a passing fault, and return what was answered; `progress` is told `stage`."""
    exchange = Exchange(method="PUT", url=url, headers=headers)
    shown = stage or f"sending {path.name}"

    def attempt() -> dict[str, Any]:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            told = _Told(file, lambda done: progress and progress(shown, done, size))
            sized = {**headers, "content-length": str(size)}
            with _answered(exchange, told, sized, timeout_s=FILE_TIMEOUT_S) as response:
                return _object(exchange, response.status, _read(exchange, response))

    return _persistent(attempt)


def fetch(url: str, path: Path, *, size: int | None = None, advance: Callable[[int], object] | None = None) -> int:
    """GET into `path`, which appears only when it is whole; the number of bytes. Again after a passing fault."""
    draft = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    exchange = Exchange(method="GET", url=url)
    try:
        written = _persistent(lambda: _fetch_once(exchange, draft, size, advance))
        draft.replace(path)
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be written: {cause.strerror or cause}; give another folder with -o") from cause
    finally:
        with suppress(OSError):
            draft.unlink()
    return written


def _fetch_once(exchange: Exchange, draft: Path, size: int | None, advance: Callable[[int], object] | None) -> int:
    with _answered(exchange, None, {}, timeout_s=FILE_TIMEOUT_S) as response:
        if response.status >= 400:
            _object(exchange, response.status, _read(exchange, response))
        promised = response.headers.get("content-length")
        expected = size if size is not None else int(promised) if promised else None
        written = 0
        with draft.open("wb") as out:
            while block := _read(exchange, response, CHUNK):
                written += out.write(block)
                if advance is not None:
                    advance(len(block))
        if expected is not None and written != expected:
            text = f"{exchange.url}: {written} bytes came, {expected} were promised"
            raise ControllerError(f"{text}; try again", code="TRANSFER_CUT", status=502)
    return written


def _persistent(attempt: Callable[[], T]) -> T:
    """Whatever `attempt` returns, after several attempts where faults are of a passing kind."""
    for pause_s in PAUSES_S:
        try:
            return attempt()
        except ControllerError as error:
            if error.status is not None and error.status not in PASSING:
                raise
        time.sleep(pause_s)
    return attempt()


class _Told:
    """A file that tells how far it was read."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], object]) -> None:
        self._file, self._tell = file, tell

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(max(size, CHUNK))
        self._tell(self._file.tell())
        return block


@contextmanager
def _answered(
    exchange: Exchange, body: bytes | _Told | None, headers: Mapping[str, str], *, timeout_s: float
) -> Generator[http.client.HTTPResponse]:
    """The reply to a request, on a connection that is closed in the end."""
    connection, target = _connection(exchange.url, timeout_s)
    try:
        with _reaching(exchange):
            try:
                connection.request(exchange.method, target, cast("Any", body), dict(headers))
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:  # pyright: ignore[reportUnnecessaryComparison]
                    raise
            response = connection.getresponse()  # a refusal that came before all of a file was sent is read all the same
        yield response
    finally:
        connection.close()


def _connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is no address of a controller; write it as http://HOST:PORT")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=ssl.create_default_context()), target
    return http.client.HTTPConnection(host, port, timeout=timeout_s), target


@contextmanager
def _reaching(exchange: Exchange) -> Generator[None]:
    """Names what keeps a request from being answered."""
    origin = "/".join(exchange.url.split("/", 3)[:3])
    try:
        yield
    except TimeoutError as cause:
        text = f"the controller at {origin} did not answer in time"
        raise ControllerError(f"{text}; see: penstock controller status", code="CONTROLLER_TIMEOUT") from cause
    except (OSError, http.client.HTTPException) as cause:
        why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        text = f"no controller answers at {origin}: {why}"
        remedy = "start it with: penstock controller up, or correct PENSTOCK_CONTROLLER"
        raise ControllerError(f"{text}; {remedy}", code="CONTROLLER_UNREACHABLE") from cause


def _read(exchange: Exchange, response: http.client.HTTPResponse, size: int | None = None) -> bytes:
    with _reaching(exchange):
        return response.read() if size is None else response.read(size)


def _object(exchange: Exchange, status: int, content: bytes) -> dict[str, Any]:
    """The JSON object of a reply; ControllerError where it tells of an error or is none."""
    try:
        found: Any = orjson.loads(content) if content.strip() else {}
    except orjson.JSONDecodeError:
        found = None
    told = cast("dict[str, Any]", found) if isinstance(found, dict) else None
    if status < 300 and told is not None:
        return told
    origin = "/".join(exchange.url.split("/", 3)[:3])
    if told is None:
        text = f"{origin} answers with something that is no controller's reply (status {status})"
        raise ControllerError(f"{text}; correct PENSTOCK_CONTROLLER", code="CONTROLLER_ANSWER", status=status)
    message = str(told.get("error") or told.get("message") or f"{origin} answers with status {status}")
    raise ControllerError(message, code=str(told.get("code") or f"HTTP_{status}"), status=status, details=told)
