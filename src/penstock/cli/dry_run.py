"""`--dry-run`: everything is checked, one rollout is run from end to end, and nothing is left behind."""

import contextlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.output import reward

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.workspace.preflight import DryRunResult
    from penstock.workspace.sections import RunKind

Option = Annotated[bool, typer.Option("--dry-run", help="Check everything, run one rollout, and leave nothing behind.")]


def try_once(config: "RunConfig", kind: "RunKind", *, as_json: bool, following: str) -> None:
    """Try the first task, tell what came of it, and exit: with code 1 where the rollout failed. `following` is the real command."""
    from penstock.workspace.preflight import check_project, dry_run

    check_project(config, f"the run {config.run.name!r}")
    with contextlib.redirect_stdout(sys.stderr):
        found = dry_run(config, kind=kind, listener=_listen)
    typer.echo(orjson.dumps(asdict(found)).decode() if as_json else as_text(found, following))
    raise typer.Exit(0 if found.completed else 1)


def warn(line: str) -> None:
    """Say something that does not keep a run from beginning."""
    typer.echo(f"penstock: {line}", err=True)


def as_text(found: "DryRunResult", following: str) -> str:
    """One line for each thing that is known of it."""
    rows = [("checked", "config, agent, every row, model"), ("rollout", f"{found.status} in {found.seconds:.1f} s")]
    rows += [("why", found.message)] if found.message else []
    rows.append(("reward", reward(found.reward)))
    rows.append(("calls", f"{found.steps} of {found.model}, {found.tokens} tokens sampled"))
    rows += [("next", following)] if found.completed else []
    return "\n" + "\n".join(f"  {label:<12}{text}".rstrip() for label, text in rows) + "\n"


def _listen(name: str, fields: dict[str, Any]) -> None:
    if name == "stage" and not fields.get("done"):
        warn(fields["text"])
