"""Checks of a request's head: its sizes, its Host header and its target. All of it is refused before an app sees anything."""

import re
from urllib.parse import unquote_to_bytes, urlsplit

from penstock.errors import RequestError
from penstock.http.asgi import host_name

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 200
MAX_TARGET_BYTES = 16 * 1024

_WRONG_IN_TARGET = re.compile(rb"[^!-~]|%(?![0-9A-Fa-f]{2})|%[01][0-9A-Fa-f]|%7[Ff]")
"""What is not printable ASCII, a percent sign that encodes nothing, and encoded control characters."""


def check_headers(version: str, headers: list[tuple[bytes, bytes]]) -> None:
    if version not in ("1.1", "1.0"):
        raise RequestError(f"this server speaks HTTP/1.1, not {version}", status=505, code="http_version")
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        raise head_too_large()
    for name, value in headers:
        if name == b"transfer-encoding" and (version == "1.0" or value.lower() != b"chunked"):
            text = "the only transfer-encoding taken is chunked, with HTTP/1.1"
            raise RequestError(text, status=501, code="transfer_encoding")


def head_too_large() -> RequestError:
    text = f"the request's headers are more than {MAX_HEADERS}, or larger than {MAX_HEAD_BYTES} bytes"
    return RequestError(text, status=431, code="headers_too_large")


def check_host(version: str, headers: list[tuple[bytes, bytes]]) -> str:
    """Return the one Host header, which only HTTP/1.0 may leave out: then an empty string."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if not hosts and version == "1.0":
        return ""
    if len(hosts) != 1:
        raise RequestError(f"a request has one Host header, not {len(hosts)}", code="invalid_host")
    if not host_name(hosts[0]):
        raise RequestError(
            f"the Host header must be a name or address, with a port or none, not {hosts[0][:60]!r}", code="invalid_host"
        )
    return hosts[0]


def origin_form(target: bytes, host: str) -> bytes:
    """Return the target as path and query. A whole URL is taken only if it is of the host that the request is for."""
    if wrong := _WRONG_IN_TARGET.search(target):
        what = target[wrong.start() : wrong.start() + 3].decode("latin-1")
        raise _invalid_target(f"has {what!r} at byte {wrong.start()}; percent-encode it")
    if b"%" in target:
        try:
            unquote_to_bytes(target).decode()
        except UnicodeDecodeError as cause:
            raise _invalid_target("encodes bytes that are not UTF-8") from cause
    if target.startswith(b"/"):
        return target
    try:
        url = urlsplit(target.decode("ascii"))
    except ValueError as cause:
        raise _invalid_target("is no URL") from cause
    if url.scheme not in ("http", "https"):
        raise _invalid_target("must begin with a slash")
    if url.netloc.lower() != host.lower():
        raise _invalid_target(f"is a URL of {url.netloc[:60]!r}; this server is no proxy")
    return f"{url.path or '/'}{f'?{url.query}' if url.query else ''}".encode("ascii")


def _invalid_target(why: str) -> RequestError:
    return RequestError(f"the request's target {why}", code="invalid_target")
