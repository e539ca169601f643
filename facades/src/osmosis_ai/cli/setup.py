"""`osmosis doctor` and `osmosis upgrade`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from osmosis_ai.cli.connection import identify, open_client, platform_url
from osmosis_ai.cli.output import CliError
from osmosis_ai.cli.results import Operation
from penstock.errors import PenstockError


def doctor(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="A workspace, or a folder that shall be one.")] = Path(),
    fix: Annotated[bool, typer.Option("--fix", help="Make what is missing.")] = False,
) -> Operation:
    """Check a workspace (exit code 1 where something is missing); --fix makes it whole."""
    from penstock.workspace.layout import FOLDERS, find_workspace
    from penstock.workspace.scaffold import create_missing_folders as make
    from penstock.workspace.scaffold import missing_folders as lacking

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
    """Tell how to upgrade: this command installs nothing by itself."""
    message = "Nothing was installed; upgrade with, in the checkout: git pull && pip install -e . -e facades"
    return Operation(operation="upgrade", status="noop", message=message)


def _workspace(identity: str) -> dict[str, Any] | None:
    """Returns the controller's record of the workspace, or None. The check must not depend on a controller or start one."""
    if platform_url() is None:
        return None
    try:
        return open_client(identity).verify().get("workspace")
    except PenstockError:
        return None
