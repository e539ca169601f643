"""Small tools for ASGI apps: headers, bounded request bodies, JSON."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import orjson
from starlette.types import Receive

from penstock.errors import RequestError

ON_DISCONNECT = "penstock.on_disconnect"
"""In a scope, by our server: called with a function, has that called once the caller leaves; called with None, no longer."""
Headers = Iterable[tuple[bytes, bytes]]


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


def parse_json(body: bytes, read: Callable[[bytes], Any] = orjson.loads) -> dict[str, Any]:
    """The JSON object that `body` is."""
    try:
        value = read(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the request body must be a JSON object", code="invalid_json")
    return cast("dict[str, Any]", value)


def header(headers: Headers, name: bytes) -> str:
    """The value of a header; empty where it is absent."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return ""
