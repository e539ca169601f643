"""`osmosis doctor`, `upgrade`, `template` and `rollout`: workspaces and their rollouts."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from osmosis_ai.cli.connection import (
    All,
    Connection,
    Limit,
    connect,
    fetch_page,
    identify,
    open_client,
    platform_url,
    require_workspace,
)
from osmosis_ai.cli.output import CliError, Listing, Operation, moment, plain
from osmosis_ai.cli.records import ROLLOUT, Record, known, taken
from penstock.errors import ControllerError, PenstockError
from penstock_controller.workspace import ROLLOUTS

# Workspace


def doctor(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="A workspace, or a folder that shall be one.")] = Path(),
    fix: Annotated[bool, typer.Option("--fix", help="Make what is missing.")] = False,
) -> Operation:
    """Check a workspace (exit code 1 where something is missing); --fix makes it whole."""
    from penstock_controller.workspace import FOLDERS, find_workspace
    from penstock_controller.workspace import create_missing_folders as make
    from penstock_controller.workspace import missing_folders as lacking

    if not path.is_dir():
        raise CliError(f"{path}: no such folder; give one, or make it first")
    found = find_workspace(path)
    folder = found.path if found else path.resolve()
    fixed = make(folder) if fix else []
    left = lacking(folder)
    git = identify(folder)
    resource = {
        "workspace_directory": str(folder),
        "git": git.as_json(),
        "workspace": _workspace(git.identity),
        "required_paths": list(FOLDERS),
        "missing": left,
        "valid": not left,
        "fixed": fixed,
    }
    if left:
        message = f"{folder} is no workspace yet: there is no {', '.join(left)}. Make what is missing: osmosis doctor --fix"
        raise CliError(message, "WORKSPACE_REQUIRED", **resource)
    made = f"; made {', '.join(fixed)}" if fixed else ""
    hints = ["Begin a rollout: osmosis rollout init NAME, or osmosis template apply NAME"]
    return Operation(operation="doctor", message=f"{folder} is a workspace{made}.", resource=resource, hints=hints)


def upgrade() -> Operation:
    """Print how to upgrade; nothing is installed."""
    message = "Nothing was installed; upgrade with, in the checkout: git pull && pip install -e . -e packages/compat"
    return Operation(operation="upgrade", status="noop", message=message)


def _workspace(identity: str) -> dict[str, Any] | None:
    """Returns the controller's record of the workspace, or None. The check must not depend on a controller or start one."""
    if platform_url() is None:
        return None
    try:
        return open_client(identity).verify().get("workspace")
    except PenstockError:
        return None


# Templates

template_app = typer.Typer(help="Rollouts to begin with.", no_args_is_help=True)
Force = Annotated[bool, typer.Option("--force", "-f", help="Write over files that are there.")]


@template_app.command("list")
def list_templates() -> Listing:
    """Name the templates."""
    from penstock_controller.workspace import TEMPLATES

    named = {name: one.about for name, one in TEMPLATES.items()}
    return Listing(
        items=[{"name": name} for name in named],
        shown=[[name, about] for name, about in named.items()],
        titles=["Name", "About"],
        total_count=len(named),
        hint="Take one: osmosis template apply NAME",
    )


@template_app.command("apply")
def apply(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See: osmosis template list.")], force: Force = False
) -> Operation:
    """Copy a template into the workspace: its rollout, experiment files and tasks."""
    from penstock.system.packages import install_command
    from penstock_controller.workspace import TEMPLATES

    template = TEMPLATES.get(name)
    if template is None:
        raise CliError(f"There is no template {name}; there are {', '.join(TEMPLATES)}", "NOT_FOUND")
    workspace = require_workspace()
    _refuse_loss(workspace, list(template.portable()), force=force)
    files = _relative(workspace, template.write(workspace, force=force, portable=True))
    folders = sorted({str(workspace / Path(file).parent) for file in files})
    resource: dict[str, Any] = {"name": name, "destinations": folders, "files": files}
    hints = [f"Wrote {file}" for file in files] + [f"Needs: {install_command(template.extra)}", *_next(name)]
    return Operation(operation="template.apply", message=f"Wrote the template {name}.", resource=resource, hints=hints)


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the folder under rollouts/.")],
    force: Force = False,
) -> Operation:
    """Write rollouts/NAME, its two experiment files and tasks for it; they run as they are."""
    from penstock_controller.workspace import Workspace, check_name, init_rollout

    check_name(name)
    workspace = require_workspace()
    configs = {"eval": f"configs/eval/{name}.toml", "training": f"configs/training/{name}.toml"}
    _refuse_loss(workspace, [f"rollouts/{name}", *configs.values()], force=force)
    files = _relative(workspace, init_rollout(Workspace(workspace), name, force, portable=True))
    resource = {
        "name": name,
        "workspace_directory": str(workspace),
        "rollout_dir": f"rollouts/{name}",
        "configs": configs,
        "files": files,
    }
    hints = [f"Wrote {file}" for file in files] + _next(name)
    return Operation(operation="rollout.init", message=f"Wrote the rollout {name}.", resource=resource, hints=hints)


def _refuse_loss(workspace: Path, files: Sequence[str], *, force: bool) -> None:
    there = [file for file in files if (workspace / file).exists()]
    if there and not force:
        raise CliError(f"{', '.join(there)} would be written over; pass --force where that is meant", "CONFLICT", files=there)


def _relative(workspace: Path, files: Sequence[Path]) -> list[str]:
    return [file.relative_to(workspace).as_posix() for file in files]


def _next(name: str) -> list[str]:
    return [
        f"Measure it: osmosis eval submit configs/eval/{name}.toml",
        f"Train it: osmosis train submit configs/training/{name}.toml",
    ]


# Rollouts

NOT_FOUND = 404

rollout_app = typer.Typer(help="Rollouts of a workspace.", no_args_is_help=True)
rollout_app.command("init")(init)


@rollout_app.command("list")
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
