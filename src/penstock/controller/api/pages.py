"""Lists, a page at a time."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from penstock.controller.api.bodies import reply
from penstock.errors import ControllerError

MOST = 50
"""Rows of a page; also how many there are where the caller does not say."""
FURTHEST = 1 << 53


class Page(NamedTuple):
    """Which rows are asked for."""

    limit: int
    offset: int


def paged(request: Request) -> Page:
    """From `limit` (1 to 50) and `offset`; ControllerError 400 for others."""
    return Page(number(request, "limit", MOST, low=1, high=MOST), number(request, "offset", 0, low=0, high=FURTHEST))


def page_reply(
    key: str, rows: Sequence[Mapping[str, Any]], total: int, limit: int, offset: int, *, more: Mapping[str, Any] | None = None
) -> Response:
    """One page, and where the next begins; `more` stands beside the list."""
    end = offset + len(rows)
    has_more = bool(rows) and end < total
    place = {"total_count": total, "has_more": has_more, "next_offset": end if has_more else None}
    return reply({key: list(rows)} | place | dict(more or {}))


def number(request: Request, name: str, default: int, *, low: int, high: int) -> int:
    """A whole number of the query; ControllerError 400 where it is something else or out of bounds."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and low <= int(text) <= high):
        bounds = f"from {low} to {high}" if high < FURTHEST else f"of at least {low}"
        problem = f"{name} = {text[:40]!r}: give a whole number {bounds}"
        raise ControllerError(problem, code="QUERY_INVALID", status=400, details={"field": name})
    return int(text)
