"""The summary that `penstock train` prints: results, where everything is, and the next command."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import orjson

from penstock.run.folder import RunFolder
from penstock.run.shortfalls import read_shortfalls, shortfall_rows
from penstock.train.monitoring import FIRST, LAST
from penstock.view.formatting import PlainLine, aligned, clock, counts, percent, plain_text, reward_text, sparkline

if TYPE_CHECKING:
    from penstock.train.trainer import Summary


JUDGED_STEPS = 4
"""A run of fewer steps is a trial."""


class ResumeCommand(NamedTuple):
    """The command that resumes a run, and what to append to it."""

    command: str
    steps_option: str = "--set train.steps="
    """Followed by a number of steps."""
    fresh_option: str = "--fresh"
    """Starts the run over."""
    evaluate: str = ""
    """The command that evaluates a model on the run's tasks, to be followed by the checkpoint; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """A run's summary with what only the command line knows."""

    summary: "Summary"
    rewards: list[float | None]
    """Of every step."""
    reasons: dict[str, dict[str, int]]
    """Per end other than completed: its messages and how often each came."""
    report: Path | None
    resume: ResumeCommand


def as_object(result: TrainingResult) -> str:
    fields: dict[str, Any] = asdict(result.summary)
    fields |= {"reasons": result.reasons, "report": str(result.report) if result.report else None, "next": next_command(result)}
    return orjson.dumps(fields).decode()


def as_lines(result: TrainingResult) -> str:
    """The same as lines with tabs; inner numbers have names with dots, such as `ends.completed`."""
    fields: dict[str, Any] = asdict(result.summary) | {"report": result.report, "next": next_command(result)}
    return plain_text(line for name, value in fields.items() for line in _plain_lines(name, value))


def _plain_lines(name: str, value: Any) -> Iterator[PlainLine]:
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _plain_lines(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for inner in cast("list[Any]", value):
            yield from _plain_lines(name, inner)
    else:
        yield PlainLine(name, value)


def result_text(summary: "Summary") -> str:
    """What `penstock.train` prints: the results without commands."""
    result = TrainingResult(summary=summary, rewards=read_rewards(summary), reasons={}, report=None, resume=ResumeCommand(""))
    places = [row for row in _place_rows(result) if row[0] in ("run folder", "checkpoint", "promoted")]
    return f"\n{_headline(result)}\n\n{aligned([*_result_rows(result), *places])}\n"


def read_rewards(summary: "Summary") -> list[float | None]:
    """The mean reward of every step."""
    return [entry["reward"] for entry in RunFolder(Path(summary.folder), resumed=True).metrics()]


def as_text(result: TrainingResult) -> str:
    rows = [*_result_rows(result), ("", ""), *_place_rows(result)]
    return f"\n{_headline(result)}\n\n{aligned(rows)}\n"


def learned_nothing(summary: "Summary") -> bool:
    """Whether a run has finished without an update. Fewer than `JUDGED_STEPS` steps are a trial, which need not make one."""
    return summary.status == "finished" and summary.updates == 0 and summary.steps >= JUDGED_STEPS


def next_command(result: TrainingResult) -> str:
    """The command that resumes a stopped run, evaluates what a finished one made, or starts over what learned nothing."""
    summary, resume = result.summary, result.resume
    if summary.status == "stopped":
        return resume.command
    if learned_nothing(summary):
        return f"{resume.command} {resume.fresh_option}"
    if resume.evaluate and summary.checkpoint and summary.updates != 0:
        return f"{resume.evaluate} --model {shlex.quote(summary.checkpoint)}"
    return longer_command(result)


def longer_command(result: TrainingResult) -> str:
    """The command that trains a finished run further; a number of steps that it has already is replaced."""
    *flag, key = result.resume.steps_option.split()
    words: list[str] = []
    for word in shlex.split(result.resume.command):
        if word.startswith(key):
            words = words[: len(words) - len(flag)]
        else:
            words.append(word)
    return f"{shlex.join(words)} {result.resume.steps_option}{max(1, result.summary.steps) * 2}"


def _headline(result: TrainingResult) -> str:
    summary = result.summary
    if summary.already_finished:
        fresh = f"{result.resume.command} {result.resume.fresh_option}"
        return f"Run {summary.name} finished earlier; nothing was done. To start over: {fresh}"
    if summary.status == "stopped":
        when = f"after step {summary.steps}" if summary.steps else "before its first step"
        return f"Run {summary.name} stopped safely {when}."
    nothing = " and learned nothing" if summary.updates == 0 else ""
    return f"Run {summary.name} finished{nothing}: {summary.steps} steps in {clock(summary.train_seconds)}."


def _result_rows(result: TrainingResult) -> list[tuple[str, str]]:
    summary = result.summary
    rows = [("reward", f"{_change(summary.first_reward, summary.last_reward)}   {sparkline(result.rewards)}")]
    if summary.last_reward is not None:
        first, last = (min(count, summary.rollouts if summary.graded is None else summary.graded) for count in (FIRST, LAST))
        rows.append(("", f"mean of the first {first} graded rollouts → of the last {last}"))
    if summary.eval_after is not None:
        rows.append(("held-out", _change(summary.eval_before, summary.eval_after)))
    elif summary.eval_before is not None:
        rows.append(("held-out", f"{reward_text(summary.eval_before)} before training"))
    if summary.updates is not None and summary.steps:
        rows.append(("updates", f"{summary.updates} of {summary.steps} steps published a new version"))
    rows += [("", line) for line in wrap(summary.stalled, 66, break_long_words=False)]
    rows += [("alarms", line) for line in wrap(", ".join(summary.alarms), 66)]
    rows += [("code", line) for change in summary.code_changes for line in wrap(f"{change}: rewards may not compare", 66)]
    rows += _exact_rows(summary)
    rows.append(("rollouts", f"{summary.rollouts:,}: {counts(summary.ends)}" if summary.ends else f"{summary.rollouts:,}"))
    for end, messages in result.reasons.items():
        message, count = max(messages.items(), key=lambda item: item[1])
        reason = shorten(f"{end} ({count}x): {message or 'no message'}", 400, placeholder="…")
        rows += [("", line) for line in wrap(reason, 66, break_long_words=False, subsequent_indent="  ")]
    rows += shortfall_rows(read_shortfalls(summary.shortfalls))
    rows.append(("seconds", f"{summary.train_seconds:.0f}"))
    if summary.peak_memory_mb is not None:
        rows.append(("memory", f"{summary.peak_memory_mb:,.0f} MB at most"))
    return rows


def _exact_rows(summary: "Summary") -> list[tuple[str, str]]:
    unhashed = f", {summary.unhashed_tokens:,} without a digest of their context" if summary.unhashed_tokens else ""
    rows = [("exact", f"{percent(summary.exact_token_rate)} of {summary.sampled_tokens:,} sampled tokens{unhashed}")]
    if summary.behaviour_unknown_tokens:
        fate = f"{summary.recomputed_tokens:,} trained with the trainer's own" if summary.recomputed_tokens else "none trained"
        rows.append(("unknown", f"behaviour log-probability of {summary.behaviour_unknown_tokens:,} sampled tokens: {fate}"))
    masked = {reason: count for reason, count in summary.masked.items() if reason != "zero_advantage"}  # that is no fault
    named = [("not exact", "tokens: ", summary.inexact), ("masked", "steps: ", masked), ("breaks", "", summary.breaks)]
    named += [("dropped", "groups: ", summary.dropped), ("not done", "calls: ", summary.notices)]
    return rows + [(label, f"{of}{counts(numbers)}") for label, of, numbers in named if numbers]


def _place_rows(result: TrainingResult) -> list[tuple[str, str]]:
    summary = result.summary
    rows = [("run folder", summary.folder)]
    if result.report:
        rows.append(("report", str(result.report)))
    if summary.checkpoint:
        rows.append(("checkpoint", f"{summary.checkpoint} (policy version {summary.policy_version})"))
    rows.append(("next", next_command(result)))
    if summary.status == "finished" and not learned_nothing(summary) and next_command(result) != longer_command(result):
        rows.append(("", longer_command(result)))
    return rows


def _change(before: float | None, after: float | None) -> str:
    return f"{reward_text(before)} → {reward_text(after)}"
