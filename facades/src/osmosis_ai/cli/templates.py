"""`osmosis template` and `osmosis rollout init`: create rollouts that run without changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from osmosis_ai.cli.connection import require_workspace
from osmosis_ai.cli.output import CliError
from osmosis_ai.cli.results import Listing, Operation

app = typer.Typer(help="Rollouts to begin with.", no_args_is_help=True)
Force = Annotated[bool, typer.Option("--force", "-f", help="Write over files that are there.")]


@app.command("list")
def list_templates() -> Listing:
    """Name the templates."""
    from penstock.workspace.scaffold import TEMPLATES

    named = {name: one.about for name, one in TEMPLATES.items() if one.rollout}
    return Listing(
        items=[{"name": name} for name in named],
        shown=[[name, about] for name, about in named.items()],
        titles=["Name", "About"],
        total_count=len(named),
        hint="Take one: osmosis template apply NAME",
    )


@app.command("apply")
def apply(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See: osmosis template list.")], force: Force = False
) -> Operation:
    """Copy a template into the workspace: its rollout, experiment files and tasks."""
    from penstock.system.packages import install_command
    from penstock.workspace.scaffold import TEMPLATES, apply_template

    template = TEMPLATES.get(name)
    if template is None or not template.rollout:
        known = ", ".join(name for name, one in TEMPLATES.items() if one.rollout)
        raise CliError(f"There is no template {name}; there are {known}", "NOT_FOUND")
    workspace = require_workspace()
    _refuse_loss(workspace, list((template.portable or template.files)()), force=force)
    files = _relative(workspace, apply_template(workspace, name, force=force, portable=True))
    folders = sorted({str(workspace / Path(file).parent) for file in files})
    resource: dict[str, Any] = {"name": name, "destinations": folders, "files": files}
    hints = [f"Wrote {file}" for file in files] + [f"Needs: {install_command(template.extra)}", *_next(name)]
    return Operation(operation="template.apply", message=f"Wrote the template {name}.", resource=resource, hints=hints)


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the folder under rollouts/.")],
    force: Force = False,
) -> Operation:
    """Write rollouts/NAME, its two experiment files and tasks for it; they run as they are."""
    from penstock.workspace.layout import Workspace
    from penstock.workspace.scaffold import check_name, init_rollout

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
