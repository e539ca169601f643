"""The last words of a run: what it came to, where everything is, and the next command."""

from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any

import orjson

from penstock.cli.output import clock, counts, percent, reward, sparkline

if TYPE_CHECKING:
    from penstock.train.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A summary with what only the command line knows."""

    summary: "Summary"
    rewards: list[float | None]
    """Of every step."""
    reasons: dict[str, dict[str, int]]
    """Per end other than completed: its messages and how often each came."""
    report: Path | None
    command: str
    """Takes the run up again."""
    steps_option: str = "--set train.steps="
    """What sets the number of steps there."""
    fresh_option: str = "--fresh"
    """What starts the run over there."""


def as_object(ending: Ending) -> str:
    result: dict[str, Any] = asdict(ending.summary)
    result |= {"reasons": ending.reasons, "report": str(ending.report) if ending.report else None, "next": next_command(ending)}
    return orjson.dumps(result).decode()


def as_text(ending: Ending) -> str:
    """A small table, aligned, in words."""
    rows = [*_result_rows(ending), ("", ""), *_place_rows(ending)]
    body = "\n".join(f"  {label:<12}{text}".rstrip() for label, text in rows)
    return f"\n{_headline(ending)}\n\n{body}\n"


def next_command(ending: Ending) -> str:
    """What to type next: go on where the run stopped, or train further where it finished."""
    if ending.summary.status == "stopped":
        return ending.command
    return f"{ending.command} {ending.steps_option}{max(1, ending.summary.steps) * 2}"


def _headline(ending: Ending) -> str:
    summary = ending.summary
    if summary.already_finished:
        return f"Run {summary.name} finished earlier; nothing was done. To start over: {ending.command} {ending.fresh_option}"
    if summary.status == "stopped":
        when = f"after step {summary.steps}" if summary.steps else "before its first step"
        return f"Run {summary.name} stopped safely {when}."
    return f"Run {summary.name} finished: {summary.steps} steps in {clock(summary.train_seconds)}."


def _result_rows(ending: Ending) -> list[tuple[str, str]]:
    summary = ending.summary
    rows = [("reward", f"{_change(summary.first_reward, summary.last_reward)}   {sparkline(ending.rewards)}")]
    if summary.eval_after is not None:
        rows.append(("held-out", _change(summary.eval_before, summary.eval_after)))
    elif summary.eval_before is not None:
        rows.append(("held-out", f"{reward(summary.eval_before)} before training"))
    rows += _exact_rows(summary)
    rows.append(("rollouts", f"{summary.rollouts:,}: {counts(summary.ends)}" if summary.ends else f"{summary.rollouts:,}"))
    for end, messages in ending.reasons.items():
        message, count = max(messages.items(), key=lambda item: item[1])
        reason = shorten(f"{end} ({count}x): {message or 'no message'}", 400, placeholder="…")
        rows += [("", line) for line in wrap(reason, 66, break_long_words=False, subsequent_indent="  ")]
    rows.append(("seconds", f"{summary.train_seconds:.0f}"))
    return rows


def _exact_rows(summary: "Summary") -> list[tuple[str, str]]:
    unhashed = f", {summary.unhashed_tokens:,} without a digest of their context" if summary.unhashed_tokens else ""
    rows = [("exact", f"{percent(summary.exact_token_rate)} of {summary.sampled_tokens:,} sampled tokens{unhashed}")]
    masked = {reason: count for reason, count in summary.masked.items() if reason != "zero_advantage"}  # that is no fault
    named = [("not exact", "tokens: ", summary.inexact), ("masked", "steps: ", masked), ("breaks", "", summary.breaks)]
    return rows + [(label, f"{of}{counts(numbers)}") for label, of, numbers in named if numbers]


def _place_rows(ending: Ending) -> list[tuple[str, str]]:
    summary = ending.summary
    rows = [("run folder", summary.folder)]
    if ending.report:
        rows.append(("report", str(ending.report)))
    if summary.checkpoint:
        rows.append(("checkpoint", f"{summary.checkpoint} (policy version {summary.policy_version})"))
    rows.append(("next", f"{next_command(ending)}"))
    return rows


def _change(before: float | None, after: float | None) -> str:
    return f"{reward(before)} → {reward(after)}"
