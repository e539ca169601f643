"""`--dry-run`: check everything, run one rollout from end to end, leave nothing behind."""

import contextlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.output import warn
from penstock.view.formatting import NOTICES, aligned, reward_text

if TYPE_CHECKING:
    from penstock.config import RunConfig, RunKind
    from penstock.run.preflight import DryRunResult

Option = Annotated[bool, typer.Option("--dry-run", help="Check everything, run one rollout, and leave nothing behind.")]


def try_once(config: "RunConfig", kind: "RunKind", *, as_json: bool, following: str) -> None:
    """Run the first task, print the result and exit, with code 1 if the rollout failed. `following` is the real command."""
    from penstock.run.preflight import check_project, dry_run
    from penstock.train.algorithm import check_algorithm

    check_project(config, f"the run {config.run.name!r}", check_algorithm)
    with contextlib.redirect_stdout(sys.stderr):
        found = dry_run(config, check_algorithm, kind=kind, listener=Notices())
    typer.echo(orjson.dumps(asdict(found)).decode() if as_json else as_text(found, following))
    raise typer.Exit(0 if found.completed else 1)


def as_text(found: "DryRunResult", following: str) -> str:
    rows = [("checked", "config, agent, every row, model"), ("rollout", f"{found.status} in {found.seconds:.1f} s")]
    rows += [("why", found.message)] if found.message else []
    rows.append(("reward", reward_text(found.reward)))
    rows.append(("calls", f"{found.steps} of {found.model}, {found.tokens} tokens sampled"))
    rows += [("next", following)] if found.completed else []
    return f"\n{aligned(rows)}\n"


class Notices:
    """Prints each stage once, and what people must see."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if name in NOTICES:
            warn(fields["text"])
        elif name == "stage" and fields["text"] != self._stage:
            self._stage = fields["text"]
            warn(self._stage)
