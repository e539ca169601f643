"""`penstock rollout init, list` and `penstock doctor`: the rollouts and experiment files of a workspace."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import doctor as core
from penstock.cli.doctor import Check
from penstock.cli.output import AsJson, Plain, TableColumn, print_result, print_table
from penstock.config import RunKind, read_toml
from penstock.errors import ConfigError
from penstock_controller.cli.connection import connect, fetch_page
from penstock_controller.workspace import (
    EVALS,
    FOLDERS,
    TRAININGS,
    Workspace,
    create_missing_folders,
    find_workspace,
    init_rollout,
    workspace_of,
)


def add_rollout_commands(app: typer.Typer) -> None:
    app.command("init")(init)
    app.command("list")(list_rollouts)


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the folder under rollouts/.")],
    force: Annotated[bool, typer.Option("--force", "-f", help="Write over files that are there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a rollout that runs unchanged, with tasks and experiment files."""
    workspace = workspace_of(Path())
    written = [str(path.relative_to(workspace.path)) for path in init_rollout(workspace, name, force)]
    following = [f"penstock eval run configs/eval/{name}.toml", f"penstock eval submit configs/eval/{name}.toml"]
    text = f"Wrote rollout {name} into {workspace.path}:\n\n  " + "\n  ".join(written) + "\n\nNext:\n\n  " + "\n  ".join(following)
    print_result({"name": name, "workspace": str(workspace.path), "files": written, "next": following}, text, as_json=as_json)


def list_rollouts(
    registered: Annotated[bool, typer.Option("--registered", help="List those of the repository at the controller.")] = False,
    branch: Annotated[str | None, typer.Option(help="Of a registered repository.")] = None,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """List the rollouts of the workspace here, or of its repository at the controller."""
    if branch is not None and not registered:
        raise ConfigError("--branch goes with --registered: the workspace has the files that are there now")
    page = _registered_rollouts(branch) if registered else _workspace_rollouts()
    columns = [
        TableColumn("name", lambda row: row.get("name")),
        TableColumn("commit", lambda row: row.get("last_synced_commit_sha")),
    ]
    empty = "there is no rollout; begin with: penstock rollout init NAME"
    print_table(page, "rollouts", columns[: 1 + registered], as_json=as_json, plain=plain, empty=empty)


def _workspace_rollouts() -> dict[str, Any]:
    workspace = workspace_of(Path())
    rows = [{"name": name, "path": str(workspace.path / "rollouts" / name)} for name in workspace.rollouts()]
    return {"rollouts": rows, "total_count": len(rows), "has_more": False, "next_offset": None}


def _registered_rollouts(branch: str | None) -> dict[str, Any]:
    client = connect()
    return fetch_page(
        lambda limit, offset: client.rollouts(limit=limit, offset=offset, branch=branch), "rollouts", 50, everything=True
    )


def doctor(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="A workspace, or a folder to turn into one.")] = Path(),
    fix: Annotated[bool, typer.Option("--fix", help="Create the missing folders of a workspace.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check that training can run on this machine (exit code 1 if not), with a remedy for all that is missing.

    Also checks the layout and experiment files of a workspace; --fix turns PATH into one.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give a workspace, or a folder to turn into one")
    made = create_missing_folders(path) if fix and find_workspace(path) is None else []
    checks = [*core.run_checks(), *core.packages("penstock-controller", label="controller"), *workspace(path, made)]
    core.print_checks(checks, fixed=made, as_json=as_json)


def workspace(path: Path, made: Sequence[str] = ()) -> Iterator[Check]:
    """Check the workspace around `path` and its experiment files; nothing if there is none."""
    found = find_workspace(path)
    if found is None:
        folder = path.resolve()
        missing = Workspace(folder).missing()
        if len(missing) < len(FOLDERS):  # an incomplete workspace, not just any folder
            remedy = f"make it with: penstock doctor {path} --fix"
            yield Check(name="workspace", state="note", found=f"{folder} has no {', '.join(missing)}", remedy=remedy)
        return
    created = f"; made {', '.join(made)}" if made else ""
    yield Check(name="workspace", state="ok", found=f"{found.path}{created}; rollouts: {', '.join(found.rollouts()) or 'none yet'}")
    kinds: tuple[tuple[str, RunKind], ...] = ((EVALS, "eval"), (TRAININGS, "train"))
    for folder, kind in kinds:
        for file in sorted((found.path / folder).glob("*.toml")):
            yield from _experiment(file, kind)


def _experiment(file: Path, kind: RunKind) -> Iterator[Check]:
    from penstock_controller.experiment import is_experiment, read_experiment  # loads much that other commands do not need

    try:
        tables = read_toml(file)
        if is_experiment(tables):
            read_experiment(tables, kind, file.name)
    except ConfigError as error:
        lines = [issue.line for issue in error.issues] or [str(error)]
        yield Check(name=file.stem, state="note", found=f"{file}: {'; '.join(lines)}", remedy="fix the file")
