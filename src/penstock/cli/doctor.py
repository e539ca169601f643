"""`penstock doctor`: whether training can run on this machine and a workspace is whole, and what to do where it is not."""

from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cli.checks import Check


def doctor(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="A workspace, or a folder that shall be one.")] = Path(),
    fix: Annotated[bool, typer.Option("--fix", help="Make the folders of a workspace that are missing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check that training can run on this machine (exit code 1 if not), with a remedy for all that is missing.

    In a workspace, its layout and experiment files are checked too; --fix makes PATH one.
    """
    from penstock.cli import checks
    from penstock.workspace.layout import find_workspace
    from penstock.workspace.scaffold import fix as mend

    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give a workspace, or a folder that shall be one")
    made = mend(path) if fix and find_workspace(path) is None else []
    found = [*checks.look(), *checks.workspace(path, made)]
    able = all(check.state != "fail" for check in found)
    told = {"ok": able, "fixed": made, "checks": [asdict(check) for check in found]}
    typer.echo(orjson.dumps(told).decode() if as_json else as_text(found))
    raise typer.Exit(0 if able else 1)


def as_text(checks: "list[Check]") -> str:
    """One line per check, the remedy below it, the verdict last."""
    width = max(len(check.name) for check in checks) + 2
    lines: list[str] = []
    for check in checks:
        first, *more = wrap(check.found, 80 - width - 6, break_long_words=False, break_on_hyphens=False)
        lines.append(f"{check.state:<6}{check.name:<{width}}{first}")
        lines += [f"{'':<6}{'':<{width}}{line}" for line in more]
        if check.remedy:
            lines.append(f"{'':<6}{'':<{width}}→ {check.remedy}")
    failed = sum(check.state == "fail" for check in checks)
    verdict = f"Training cannot run here: {failed} of {len(checks)} checks failed." if failed else "Training can run here."
    return "\n".join([*lines, "", verdict])
