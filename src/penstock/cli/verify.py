"""`penstock verify`: whether a run's tokens are exact, and which are not."""

import asyncio
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.view.formatting import counts, percent, ranges

if TYPE_CHECKING:
    from penstock.models import PullProgress
    from penstock.train.verify import Audit, StepFinding, TokenDeviation

SHOWN = 20
"""Findings listed as text; JSON has them all."""


NO_WEIGHTS = "no weights that sampled these tokens are on this disk"


def verify(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, for example runs/multiply.")],
    channel: Annotated[str, typer.Option(help="train, or val for the held-out evaluation.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Look at the N newest groups only.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="How far a log-probability may be off; by default what the run's precision allows."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Check every recorded token: its context, and its log-probability under the weights that sampled it.

    Compares the checkpoints with their checksums too. Reads only, so it is safe while a run is training. Exit code 1 where a token
    is not exact or none could be recomputed, or a checkpoint is damaged.
    """
    from penstock.cli.output import stage_progress

    with stage_progress() as progress:
        audit = asyncio.run(_verify(folder, progress, channel=channel, limit=limit, tolerance=tolerance))
    typer.echo(orjson.dumps(as_object(audit)).decode() if as_json else as_text(audit))
    raise typer.Exit(0 if audit.status == "exact" and not audit.damaged else 1)


async def _verify(folder: Path, progress: "PullProgress", *, channel: str, limit: int | None, tolerance: float | None) -> "Audit":
    from penstock.run.recorded_run import open_recorded_run

    async with open_recorded_run(folder, channel=channel, limit=limit) as recorded:
        from penstock.train.verify import verify as audit  # torch is loaded here, after everything that can be refused without it

        return await audit(recorded, lambda done, total: progress(f"verifying {folder}", done, total), tolerance=tolerance)


def as_object(audit: "Audit") -> dict[str, Any]:
    return {
        "run": audit.run,
        "channel": audit.channel,
        "status": audit.status,
        "groups": audit.groups,
        "rollouts": audit.rollouts,
        "steps": audit.steps,
        "sampled_tokens": audit.sampled_tokens,
        "exact_tokens": audit.exact_tokens,
        "exact_token_rate": audit.exact_token_rate,
        "unhashed_tokens": audit.unhashed_tokens,
        "inexact": dict(audit.inexact),
        "masked": dict(audit.masked),
        "breaks": dict(audit.breaks),
        "pictured_tokens": audit.pictured_tokens,
        "recomputed_tokens": audit.recomputed_tokens,
        "recomputed": {str(version): count for version, count in sorted(audit.recomputed.items())},
        "gone_tokens": audit.gone_tokens,
        "gone": {str(version): count for version, count in sorted(audit.gone.items())},
        "checkpoints": audit.checkpoints,
        "checkpoints_damaged": audit.damaged,
        "checkpoints_without_checksums": audit.without_checksums,
        "tolerance": audit.tolerance,
        "mean_deviation": audit.mean_deviation,
        "largest_deviation": audit.largest and audit.largest.deviation,
        "largest_at": audit.largest and asdict(audit.largest),
        "findings": [asdict(finding) for finding in audit.findings.values()],
    }


def as_text(audit: "Audit") -> str:
    body = "\n".join(f"  {label:<12}{text}" for label, text in _rows(audit))
    found = list(audit.findings.values())
    named = [f"  {_finding(finding)}" for finding in found[:SHOWN]]
    if len(found) > SHOWN:
        named.append(f"  and {len(found) - SHOWN:,} more steps; --json names them all")
    return "\n".join(["", _verdict(audit), "", body, *(["", *named] if named else []), ""])


def _verdict(audit: "Audit") -> str:
    match audit.status:
        case "exact":
            damaged = f" {len(audit.damaged)} of its checkpoints are DAMAGED." if audit.damaged else ""
            return f"Run {audit.run} is exact.{damaged}"
        case "inexact":
            return f"Run {audit.run} is NOT exact: {len(audit.findings):,} of {audit.steps:,} steps do not hold."
        case "unproven":
            why = "its model sees pictures, and cannot be recomputed here" if audit.sees_pictures else NO_WEIGHTS
            return f"Run {audit.run} is unproven: {why}."


def _rows(audit: "Audit") -> list[tuple[str, str]]:
    rows = [("checked", f"{audit.groups:,} groups, {audit.rollouts:,} rollouts, {audit.steps:,} steps of channel {audit.channel}")]
    rows.append(("exact", f"{percent(audit.exact_token_rate)} of {audit.sampled_tokens:,} sampled tokens"))
    rows += [("not exact", f"tokens: {counts(audit.inexact)}")] if audit.inexact else []
    rows += [("unhashed", f"{audit.unhashed_tokens:,} tokens without a digest of their context")] if audit.unhashed_tokens else []
    rows.append(
        ("recomputed", f"{audit.recomputed_tokens:,} tokens of {_versions(audit.recomputed)}" if audit.recomputed else "none")
    )
    if audit.pictured_tokens:
        rows.append(("pictures", f"{audit.pictured_tokens:,} tokens were sampled after pictures and are not recomputed"))
    if audit.gone:
        weights = f"the weights of {_versions(audit.gone)} are not on this disk"
        weights = "the model sees pictures, and its layers are not here" if audit.sees_pictures else weights
        rows.append(("gone", f"{audit.gone_tokens:,} tokens: {weights}"))
    if audit.largest:
        mean = f"mean {audit.mean_deviation:.1e}, tolerance {audit.tolerance:g}"
        rows.append(("deviation", f"largest {audit.largest.deviation:.1e}, {mean}"))
        rows.append(("", f"largest in rollout {audit.largest.rollout_id}, step {audit.largest.step}: {_compared(audit.largest)}"))
    rows.append(("checkpoints", _checkpoints(audit)))
    rows += [("", f"{name} is damaged: {problem}") for name, problem in audit.damaged.items()]
    rows.append(("masked", f"steps: {counts(audit.masked)}" if audit.masked else "none"))
    rows.append(("breaks", counts(audit.breaks) if audit.breaks else "none"))
    return rows


def _checkpoints(audit: "Audit") -> str:
    intact = audit.checkpoints - len(audit.damaged) - len(audit.without_checksums)
    named = {"match their checksums": intact, "are damaged": len(audit.damaged), "have no checksums": len(audit.without_checksums)}
    return ", ".join(f"{count} {what}" for what, count in named.items() if count) or "none"


def _versions(numbers: Collection[int]) -> str:
    return f"policy version{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _finding(finding: "StepFinding") -> str:
    size = f"{finding.tokens} token{'s' if finding.tokens != 1 else ''}"
    worst = f"; {_compared(finding.worst)}" if finding.worst else ""
    return f"rollout {finding.rollout_id}, step {finding.step}: {finding.reason}, {size}{worst}"


def _compared(token: "TokenDeviation") -> str:
    return f"token {token.token} recorded {token.recorded:.6g}, recomputed {token.recomputed:.6g} with version {token.version}"
