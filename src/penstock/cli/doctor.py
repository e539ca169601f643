"""`penstock doctor`: whether training can run on this machine, and what to do where it cannot."""

from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

if TYPE_CHECKING:
    from penstock.cli.checks import Check


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False) -> None:
    """Check that training can run on this machine (exit code 1 if not), with a remedy for all that is missing."""
    from penstock.cli.checks import look

    checks = look()
    able = all(check.state != "fail" for check in checks)
    typer.echo(orjson.dumps({"ok": able, "checks": [asdict(c) for c in checks]}).decode() if as_json else as_text(checks))
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
