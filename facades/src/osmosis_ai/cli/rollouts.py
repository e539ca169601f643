"""`osmosis rollout`: create a rollout, and list those that the controller knows."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from osmosis_ai.cli.connection import Connection, connect
from osmosis_ai.cli.figures import moment, plain
from osmosis_ai.cli.paging import All, Limit, fetch_page
from osmosis_ai.cli.records import ROLLOUT, Record, known, taken
from osmosis_ai.cli.results import Listing
from osmosis_ai.cli.templates import init
from penstock.errors import ControllerError
from penstock.workspace.layout import ROLLOUTS

NOT_FOUND = 404

app = typer.Typer(help="Rollouts of a workspace.", no_args_is_help=True)
app.command("init")(init)


@app.command("list")
def list_rollouts(
    limit: Limit = 50,
    everything: All = False,
    branch: Annotated[str | None, typer.Option("--branch", help="Only those of this branch.")] = None,
) -> Listing:
    """List the rollouts of the repository, if the controller knows it, else those of the workspace."""
    here = connect()
    try:
        page = fetch_page(
            lambda rows, at: here.client.rollouts(limit=rows, offset=at, branch=branch),
            "rollouts",
            limit=limit,
            everything=everything,
        )
    except ControllerError as error:
        if error.status != NOT_FOUND or branch is not None:
            raise
        found = local_rollouts(here)
        page = fetch_page(lambda rows, at: page_of(found, rows, at), "rollouts", limit=limit, everything=everything)
    items = [taken(record, ROLLOUT) for record in page.rows]
    return Listing(
        items=items,
        shown=[
            [plain(one["name"]), plain(one["repo_full_name"]), plain(one["last_synced_commit_sha"])[:7], moment(one["created_at"])]
            for one in items
        ],
        titles=["Name", "Repository", "Commit", "Created"],
        extra=known({"branch": branch}) | here.where,
        **page.listed(),
    )


def local_rollouts(here: Connection) -> list[Record]:
    """Returns the rollouts of a workspace whose repository the controller does not know, by name; no commit is known of them."""
    found = (here.workspace / ROLLOUTS).iterdir()
    folders = sorted(folder for folder in found if folder.is_dir() and not folder.name.startswith("."))
    return [
        {
            "id": folder.name,
            "name": folder.name,
            "is_active": True,
            "repo_full_name": here.git.identity,
            "created_at": datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(),
        }
        for folder in folders
    ]


def page_of(found: list[Record], rows: int, at: int) -> Record:
    end = at + rows
    more = end < len(found)
    return {"rollouts": found[at:end], "total_count": len(found), "has_more": more, "next_offset": end if more else None}
