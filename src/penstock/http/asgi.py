"""Small tools for ASGI apps: headers, bounded request bodies, JSON of bounded size and depth."""

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address
from typing import Any, cast

import orjson
from starlette.types import Receive

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
