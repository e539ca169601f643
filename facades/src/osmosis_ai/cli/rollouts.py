"""`osmosis rollout`: create a rollout, and list those that the controller knows."""

from typing import Annotated

import typer

from osmosis_ai.cli.connection import connect
from osmosis_ai.cli.figures import moment, plain
from osmosis_ai.cli.paging import All, Limit, fetch_page
from osmosis_ai.cli.records import ROLLOUT, known, taken
from osmosis_ai.cli.results import Listing
from osmosis_ai.cli.templates import init

app = typer.Typer(help="Rollouts of a workspace.", no_args_is_help=True)
app.command("init")(init)


@app.command("list")
def list_rollouts(
    limit: Limit = 50,
    everything: All = False,
    branch: Annotated[str | None, typer.Option("--branch", help="Only those of this branch.")] = None,
) -> Listing:
    """List the rollouts of repositories that the controller knows."""
    here = connect()
    page = fetch_page(
        lambda rows, at: here.client.rollouts(limit=rows, offset=at, branch=branch), "rollouts", limit=limit, everything=everything
    )
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
