"""Request bodies, query parameters and JSON replies."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import ControllerError, RequestError
from penstock.http.asgi import JsonBudget

MAX_BODY_BYTES = 4 << 20
"""Limit of a JSON body: a submission holds settings, no files."""
MAX_BODY_VALUES = 20_000
"""JSON values in a body."""
MAX_STRING_CHARS = 10_000
"""The limit of a field that is a name, a path or a code."""


def reply(body: Mapping[str, Any], status: int = 200, **headers: str) -> Response:
    """Returns a JSON response. Non-finite numbers become null, which clients take for absent."""
    return Response(orjson.dumps(dict(body), option=orjson.OPT_NON_STR_KEYS), status, headers, media_type="application/json")


async def read_object(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Returns the JSON object of a request's body; `{}` if it is empty. ControllerError 400 or 413 otherwise."""
    body = await read_bytes(request, max_bytes)
    if not body.strip():
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise ControllerError(f"the request's body is not JSON: {cause}", code="BODY_INVALID", status=400) from cause
    if not isinstance(value, dict):
        raise ControllerError("the request's body must be a JSON object", code="BODY_INVALID", status=400)
    try:
        JsonBudget(MAX_BODY_VALUES).spend(value, "the request's body")
    except RequestError as error:
        raise ControllerError(str(error), code="BODY_INVALID", status=400) from error
    return cast(dict[str, Any], value)


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def too_large(max_bytes: int) -> ControllerError:
    return ControllerError(f"the request's body is larger than {max_bytes} bytes; send less", code="BODY_TOO_LARGE", status=413)


def string_field(body: Mapping[str, Any], key: str, *, default: str | None = None) -> str:
    """Returns a non-empty string of a body; ControllerError 400 if it is missing without a default, or no string."""
    value = body.get(key, default)
    if not isinstance(value, str) or not value.strip():
        text = f"{key} is missing" if value is None else f"{key} must be a string that is not empty"
        raise ControllerError(f"the request's body: {text}", code="BODY_INVALID", status=400, details={"field": key})
    if len(value) > MAX_STRING_CHARS:
        text = f"{key} is longer than {MAX_STRING_CHARS} characters"
        raise ControllerError(f"the request's body: {text}", code="BODY_INVALID", status=400, details={"field": key})
    return value


def as_object(value: object) -> dict[str, Any]:
    """Returns a JSON object as a dict; empty for any other value."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


MAX_PAGE_ROWS = 50
"""Largest page, and the default."""
MAX_OFFSET = 1 << 53


class PageRequest(NamedTuple):
    limit: int
    offset: int


def page_request(request: Request) -> PageRequest:
    """Reads `limit` (1 to 50) and `offset`; ControllerError 400 if they are invalid."""
    return PageRequest(
        int_param(request, "limit", MAX_PAGE_ROWS, low=1, high=MAX_PAGE_ROWS),
        int_param(request, "offset", 0, low=0, high=MAX_OFFSET),
    )


def page_reply(
    key: str, rows: Sequence[Mapping[str, Any]], total: int, limit: int, offset: int, *, more: Mapping[str, Any] | None = None
) -> Response:
    """Returns a page of rows under `key`, with the offset of the next page; `more` are further keys."""
    end = offset + len(rows)
    has_more = bool(rows) and end < total
    position = {"total_count": total, "has_more": has_more, "next_offset": end if has_more else None}
    return reply({key: list(rows)} | position | dict(more or {}))


def int_param(request: Request, name: str, default: int, *, low: int, high: int) -> int:
    """Reads an integer of the query; ControllerError 400 if it is no integer or out of bounds."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and low <= int(text) <= high):
        bounds = f"from {low} to {high}" if high < MAX_OFFSET else f"of at least {low}"
        problem = f"{name} = {text[:40]!r}: give a whole number {bounds}"
        raise ControllerError(problem, code="QUERY_INVALID", status=400, details={"field": name})
    return int(text)
