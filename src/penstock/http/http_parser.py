"""Requests out of bytes: where each begins and ends, and which are refused."""

import logging
from math import inf
from typing import Any, Protocol

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from penstock.errors import RequestError
from penstock.http.request_cycle import Exchange, Line, make_scope

READ_BYTES = 256 * 1024
"""Of one read, at most."""
HEAD_BYTES = 64 * 1024
HEADERS = 200
TARGET_BYTES = 16 * 1024
HEAD_S = 30.0
BODY_S = 300.0
"""For any body; a large one has longer."""
SLOWEST_BYTES_S = 64 * 1024
"""Of a large body: it goes on as long as it comes as fast as this, however large it is."""

# What of a request is expected.
NEXT, HEAD, BODY = range(3)

log = logging.getLogger(__name__)


class Clock(Protocol):
    """A time that is near enough for limits of seconds, and costs nothing to read."""

    now: float


class Taker(Line, Protocol):
    def take(self, exchange: Exchange) -> None:
        """Its head is there."""
        ...


class Intake:
    """The parser of one connection, and what it is in the middle of."""

    __slots__ = (
        "_addresses", "_clock", "_fed", "_headers", "_loose", "_parser", "_resumes", "_taker", "_target",
        "deadline", "incoming", "stage",
    )  # fmt: skip

    def __init__(self, taker: Taker, clock: Clock, addresses: dict[str, Any]) -> None:
        self.stage = NEXT
        self.incoming: Exchange | None = None
        """Whose body is being read."""
        self.deadline = clock.now + HEAD_S
        """When the caller must have said what is expected."""
        self._taker = taker
        self._clock = clock
        self._addresses = addresses
        self._parser = HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._resumes = False
        self._fed = self._loose = 0
        """Bytes of the last read; bytes read since the parser last finished something, counted generously."""

    def feed(self, read: memoryview | bytes) -> None:
        """Parse what was read; a RequestError says why the caller is refused."""
        self._fed = len(read)
        self._loose += self._fed
        try:
            self._parser.feed_data(read)
        except HttpParserUpgrade as offer:
            self._decline(bytes(read[offer.args[0] :]))
        except HttpParserCallbackError as error:
            raise _cause(error) from error
        except HttpParserError as error:
            raise RequestError(f"this is not an HTTP/1.1 request: {error}", code="malformed_request") from error
        if self._loose > HEAD_BYTES + READ_BYTES:
            raise _too_large()

    def close(self) -> None:
        """Let go of the parser, which holds us."""
        self.incoming = None
        del self._parser

    def on_message_begin(self) -> None:
        """Called by the parser, as are the next."""
        self.stage = HEAD
        self._target = b""
        self._headers = []
        self.deadline = self._clock.now + HEAD_S

    def on_url(self, part: bytes) -> None:
        """More of the target."""
        self._target += part
        if len(self._target) > TARGET_BYTES:
            raise RequestError(f"the request's target is longer than {TARGET_BYTES} bytes", status=414, code="target_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._headers.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        """Hand the exchange over."""
        self.stage = BODY
        self.deadline = self._clock.now + BODY_S
        headers, self._headers = self._headers, []  # trailers go to the new list, and nowhere
        if self._resumes:
            self._resumes = False
            return
        if len(headers) > HEADERS or (self._loose > HEAD_BYTES and sum(len(n) + len(v) + 4 for n, v in headers) > HEAD_BYTES):
            raise _too_large()
        exchange = self._exchange(headers)
        self._taker.take(exchange)
        self.incoming = exchange

    def on_body(self, part: bytes) -> None:
        """More of the body."""
        self._loose = self._fed
        self.deadline += len(part) / SLOWEST_BYTES_S
        if self.incoming is not None:
            self.incoming.grow(part)

    def on_message_complete(self) -> None:
        """The request is whole, but for one with an offer: the parser only believes that no body follows that."""
        if self._parser.should_upgrade():
            return
        self._loose = self._fed
        self.stage = NEXT
        self.deadline = inf
        exchange, self.incoming = self.incoming, None
        if exchange is not None:
            exchange.complete = True
            exchange.wake()

    def _exchange(self, headers: list[tuple[bytes, bytes]]) -> Exchange:
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise RequestError(f"this server speaks HTTP/1.1, not {version}", status=505, code="http_version")
        expects = False
        for name, value in headers:
            if name == b"expect":
                expects = version == "1.1" and value.lower() == b"100-continue"
            elif name == b"transfer-encoding" and (version == "1.0" or value.lower() != b"chunked"):
                raise RequestError(
                    "the only transfer-encoding taken is chunked, with HTTP/1.1", status=501, code="transfer_encoding"
                )
        scope = make_scope(parser.get_method().decode(), version, self._target, headers)
        scope.update(self._addresses)
        return Exchange(self._taker, scope, keep=version == "1.1" and parser.should_keep_alive(), expects=expects)

    def _decline(self, rest: bytes) -> None:
        """Stay with HTTP/1.1 when the caller offers another protocol: a new parser reads on behind the head."""
        assert self.incoming is not None, "an offer is part of a head"
        headers: list[tuple[bytes, bytes]] = self.incoming.scope["headers"]
        framing = b"".join(b"%b: %b\r\n" % pair for pair in headers if pair[0] in (b"content-length", b"transfer-encoding"))
        self._parser = HttpRequestParser(self)
        self._resumes = True
        self.feed(b"POST / HTTP/1.1\r\n%b\r\n%b" % (framing, rest))


def _cause(error: HttpParserCallbackError) -> RequestError:
    """What one of our own methods raised while the parser ran."""
    cause = error.__context__
    if isinstance(cause, RequestError):
        return cause
    if isinstance(cause, HttpParserError):
        return RequestError(f"the request's target is no URL: {cause}", code="malformed_request")
    log.error("a request could not be taken in", exc_info=cause)
    return RequestError("the server failed", status=500, code="internal_error")


def _too_large() -> RequestError:
    text = f"the request's headers are more than {HEADERS}, or larger than {HEAD_BYTES} bytes"
    return RequestError(text, status=431, code="headers_too_large")
