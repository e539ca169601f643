"""Reads a controller's lists and logs, one page or all pages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from osmosis_ai.cli.connection import Connection
from osmosis_ai.cli.figures import moment, plain
from osmosis_ai.cli.output import CliError
from osmosis_ai.cli.results import Listing

LARGEST = 50
LARGEST_LOGS = 200

Limit = Annotated[int, typer.Option("--limit", help=f"How many to show, 1 to {LARGEST}.")]
All = Annotated[bool, typer.Option("--all", help="Show all of them.")]
LogLimit = Annotated[int, typer.Option("--limit", help=f"How many lines, 1 to {LARGEST_LOGS}.")]
Cursor = Annotated[str | None, typer.Option("--cursor", help="Go on further back, from the next_cursor of an earlier call.")]
LOG_FIELDS = ("timestamp", "level", "step", "message", "details")


class Page(NamedTuple):
    rows: list[dict[str, Any]]
    total_count: int
    has_more: bool
    next_offset: int | None
    beside: Mapping[str, Any]
    """The whole first reply."""

    def listed(self) -> dict[str, Any]:
        """Returns the paging fields of an envelope."""
        return {"total_count": self.total_count, "has_more": self.has_more, "next_offset": self.next_offset}


def fetch_page(following: Callable[[int, int], dict[str, Any]], key: str, *, limit: int, everything: bool) -> Page:
    """Reads one page, or all rows if `everything`. `following(limit, offset)` returns a page."""
    if not 1 <= limit <= LARGEST:
        raise CliError(f"--limit is {limit}; give a number from 1 to {LARGEST}, or --all")
    first = following(LARGEST if everything else limit, 0)
    rows: list[dict[str, Any]] = list(first.get(key) or [])
    total, offset = first.get("total_count", len(rows)), first.get("next_offset")
    if not everything:
        return Page(rows, total, bool(first.get("has_more")), offset, first)
    while offset is not None:
        page = following(LARGEST, offset)
        more: list[dict[str, Any]] = page.get(key) or []
        rows += more
        offset = page.get("next_offset") if more else None
    return Page(rows, total, False, None, first)


def show_logs(
    following: Callable[[int, str | None], dict[str, Any]], here: Connection, *, limit: int, cursor: str | None
) -> Listing:
    """Returns a page of a log, oldest line first."""
    if not 1 <= limit <= LARGEST_LOGS:
        raise CliError(f"--limit is {limit}; give a number from 1 to {LARGEST_LOGS}")
    reply = following(limit, cursor)
    rows: Sequence[dict[str, Any]] = reply.get("logs") or []
    earlier: str | None = reply.get("next_cursor")
    return Listing(
        items=[{name: row.get(name) for name in LOG_FIELDS} for row in rows],
        shown=[[moment(row.get("timestamp")), *(plain(row.get(name)) for name in LOG_FIELDS[1:4])] for row in rows],
        titles=["Time", "Level", "Step", "Message"],
        total_count=len(rows),
        has_more=earlier is not None,
        extra={"next_cursor": earlier, **here.where},
        hint=f"Earlier lines: --cursor {earlier}" if earlier else "",
    )
