"""`penstock grader attack`: whether the grader rewards replies that deserve nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from penstock.cli.output import warn
from penstock.config import CONFIG_FILE
from penstock.view.formatting import aligned

if TYPE_CHECKING:
    from penstock.run.grader_attack import AttackReport, Finding

app = typer.Typer(help="Look into the grader of an agent.")
SHOWN_CHARS = 60


@app.callback()
def root() -> None:
    """A group, though it has one command."""


@app.command()
def attack(
    file: Annotated[Path, typer.Argument(metavar="[FILE.toml]", help="The run's config file.")] = Path(CONFIG_FILE),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
    ] = None,
    count: Annotated[int, typer.Option("--tasks", min=1, metavar="N", help="How many tasks to try everything on.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="Stop after so long.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Try replies that deserve nothing against the grader: empty, echoed, enormous, all answers at once, format bait, lying tools.

    A policy finds such holes within some dozen steps, and the reward rises while nothing is learned. No model is loaded; a grader
    that asks a judge asks it for every try. Exit code 1 where a hole was found.
    """
    from penstock.run.grader_attack import as_fields, attack_grader, read_tasks
    from penstock.run.inputs import load_run_config

    config = load_run_config(file, overrides or (), "train", warn=warn)
    report = attack_grader(config, read_tasks(config), count=count, limit_s=seconds)
    typer.echo(orjson.dumps(as_fields(report)).decode() if as_json else as_text(report, file))
    raise typer.Exit(1 if report.holes else 0)


def as_text(report: "AttackReport", file: Path) -> str:
    rows = [("tried", f"{report.tried} replies on {report.tasks} tasks" + _cut(report))]
    rows.append(("right", "unknown: no task has a label" if report.honest is None else f"{report.honest:.3g} for the right answer"))
    rows.append(("ignorant", f"{report.ignorant:.3g} at best, for replies that know nothing"))
    rows += [("HOLE", _line(found)) for found in report.holes]
    rows += [("a little", _line(found)) for found in report.partial]
    rows += [("failed at", f"{found.kind}, {found.name}: {found.error}") for found in report.failing]
    if report.honest is not None and report.honest <= report.ignorant:
        rows.append(("note", "a bare right answer got no more than ignorance: the grader wants another form, or has a fault"))
    if report.holes:
        rows.append(("next", "let the grader read what the policy said last and compare all of it, then try again"))
    else:
        rows.append(("next", f"no hole was found by these replies: penstock train {file}"))
    return f"\n{aligned(rows)}\n"


def _cut(report: "AttackReport") -> str:
    return "" if report.tried == report.planned else f" (of {report.planned}: the time was over)"


def _line(found: "Finding") -> str:
    shown = repr(found.reply if len(found.reply) <= SHOWN_CHARS else found.reply[:SHOWN_CHARS] + "…")
    shown = shown.encode("utf-8", "backslashreplace").decode()
    return f"{found.reward:.3g} for {found.kind}, {found.name}: {shown} (task {found.task})"
