"""What evaluations came to, for other programs: a line for each number, its name, its value, its lower and its upper bound.

Tabs between the four, no header; a column that a number does not have is empty, and so is a value that is not known. Further names
may come with later releases; those that are there stay as they are.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.evals.compare import Compared
    from penstock.evals.metrics import Estimate
    from penstock.evals.outcome import Outcome
    from penstock.evals.run import Evaluation
    from penstock.evals.spending import Latency, Spending


class Line(NamedTuple):
    """One of them."""

    name: str
    value: object
    low: object = None
    high: object = None


def evaluation_lines(found: "Evaluation", page: Path | None) -> str:
    """Of `penstock eval run`."""
    head = [Line("name", found.name), Line("status", found.status), Line("model", found.model), Line("folder", found.folder)]
    tail = [Line("resumed", found.resumed), Line("seconds", found.seconds), Line("report", page)]
    return _text([*head, *_outcome(found.outcome), *tail])


def regraded_lines(found: "Outcome", folder: Path, page: Path | None) -> str:
    """Of `penstock eval regrade`."""
    return _text([Line("folder", folder), *_outcome(found), Line("report", page)])


def compared_lines(found: "Compared") -> str:
    """Of `penstock eval compare`."""
    lines = [Line("tasks", found.tasks), Line("left_out", found.left_out), Line("better", found.better), Line("worse", found.worse)]
    lines.append(Line("difference", *found.difference[:3]))
    lines.append(Line("p", found.difference.p))
    sides = zip(("a", "b"), (found.first, found.second), found.means, found.spent, strict=True)
    for name, folder, mean, spent in sides:
        lines += [Line(f"{name}.folder", folder), Line(f"{name}.reward", mean)]
        lines += [line._replace(name=f"{name}.{line.name}") for line in _spent(spent)]
    return _text(lines)


def _outcome(own: "Outcome") -> list[Line]:
    lines = [Line("tasks", own.tasks), Line("samples", own.samples), Line("rollouts", own.rollouts)]
    lines += [_estimate("reward", own.reward), *(_estimate(f"pass@{k}", value) for k, value in own.passes.items())]
    lines += [Line(f"end.{end}", count) for end, count in own.ends.items()]
    return [*lines, *_spent(own.spent)]


def _spent(spent: "Spending") -> list[Line]:
    lines = [Line("steps", spent.steps), Line("prompt_tokens", spent.prompt_tokens)]
    lines += [Line("completion_tokens", spent.completion_tokens), Line("cost", spent.cost)]
    return [*lines, *_latency("call_s", spent.call_s), *_latency("rollout_s", spent.rollout_s)]


def _estimate(name: str, value: "Estimate | None") -> Line:
    return Line(name, None) if value is None else Line(name, *value)


def _latency(name: str, value: "Latency | None") -> list[Line]:
    return [Line(f"{name}.p50", value and value.p50), Line(f"{name}.p95", value and value.p95)]


def _text(lines: Iterable[Line]) -> str:
    return "\n".join("\t".join(map(_cell, line)) for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
