"""Request bodies in, JSON replies out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import ControllerError

MAX_BODY_BYTES = 4 << 20
"""Bytes of a JSON body: a submission holds settings, never files."""


def reply(body: Mapping[str, Any], status: int = 200, **headers: str) -> Response:
    """A JSON object. Numbers that are not finite become null: a client takes them for absent."""
    return Response(orjson.dumps(dict(body), option=orjson.OPT_NON_STR_KEYS), status, headers, media_type="application/json")


async def read_object(request: Request, *, largest: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The JSON object that a body is; `{}` for none. ControllerError 400 or 413 for anything else."""
    body = await read_bytes(request, largest)
    if not body.strip():
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise ControllerError(f"the request's body is not JSON: {cause}", code="BODY_INVALID", status=400) from cause
    if not isinstance(value, dict):
        raise ControllerError("the request's body must be a JSON object", code="BODY_INVALID", status=400)
    return cast(dict[str, Any], value)


async def read_bytes(request: Request, largest: int) -> bytes:
    """A body of at most `largest` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > largest:
            raise too_large(largest)
        parts.append(part)
    return b"".join(parts)


def too_large(largest: int) -> ControllerError:
    return ControllerError(f"the request's body is larger than {largest} bytes; send less", code="BODY_TOO_LARGE", status=413)


def string_field(body: Mapping[str, Any], key: str, *, default: str | None = None) -> str:
    """A string of a body; ControllerError 400 where it is missing (and there is no default) or of another type."""
    value = body.get(key, default)
    if not isinstance(value, str) or not value.strip():
        text = f"{key} is missing" if value is None else f"{key} must be a string that is not empty"
        raise ControllerError(f"the request's body: {text}", code="BODY_INVALID", status=400, details={"field": key})
    return value


def as_object(value: object) -> dict[str, Any]:
    """A part of a body that is an object; empty where it is anything else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


MAX_PAGE_ROWS = 50
"""Rows of a page; also how many there are where the caller does not say."""
MAX_OFFSET = 1 << 53


class PageRequest(NamedTuple):
    """Which rows are asked for."""

    limit: int
    offset: int


def page_request(request: Request) -> PageRequest:
    """From `limit` (1 to 50) and `offset`; ControllerError 400 for others."""
    return PageRequest(
        int_param(request, "limit", MAX_PAGE_ROWS, low=1, high=MAX_PAGE_ROWS),
        int_param(request, "offset", 0, low=0, high=MAX_OFFSET),
    )


def page_reply(
    key: str, rows: Sequence[Mapping[str, Any]], total: int, limit: int, offset: int, *, more: Mapping[str, Any] | None = None
) -> Response:
    """One page, and where the next begins; `more` stands beside the list."""
    end = offset + len(rows)
    has_more = bool(rows) and end < total
    place = {"total_count": total, "has_more": has_more, "next_offset": end if has_more else None}
    return reply({key: list(rows)} | place | dict(more or {}))


def int_param(request: Request, name: str, default: int, *, low: int, high: int) -> int:
    """A whole number of the query; ControllerError 400 where it is something else or out of bounds."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and low <= int(text) <= high):
        bounds = f"from {low} to {high}" if high < MAX_OFFSET else f"of at least {low}"
        problem = f"{name} = {text[:40]!r}: give a whole number {bounds}"
        raise ControllerError(problem, code="QUERY_INVALID", status=400, details={"field": name})
    return int(text)
