"""Two evaluations of the same tasks, side by side."""

from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.evals.metrics import Difference, difference
from penstock.evals.outcome import StoredEvaluation, TaskScores, open_evaluation, score_tasks
from penstock.evals.spending import Spending, spending


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The second evaluation against the first, over the tasks that both have."""

    first: str
    second: str
    tasks: int
    means: tuple[float, float]
    difference: Difference
    better: int
    """Tasks on which the second's mean reward is higher."""
    worse: int
    left_out: int
    """Tasks that only one of them has."""
    spent: tuple[Spending, Spending]
    """By each, on the shared tasks."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.difference._asdict(), "spent": [each.as_json() for each in self.spent]}


async def compare(first: Path, second: Path) -> Comparison:
    """Compare by task id, which is derived from the content: the row does not matter."""
    async with open_evaluation(first) as old, open_evaluation(second) as new:
        scored = [await score_tasks(found.groups()) for found in (old, new)]
    one, other = ({each.task_id: each.mean for each in own} for own in scored)
    shared = [task for task in one if task in other]
    if not shared:
        raise ConfigError(f"{first} and {second} have no task in common; evaluate both on the same dataset")
    before, after = [one[task] for task in shared], [other[task] for task in shared]
    return Comparison(
        first=str(first),
        second=str(second),
        tasks=len(shared),
        means=(sum(before) / len(before), sum(after) / len(after)),
        difference=difference(before, after),
        better=sum(a > b for b, a in zip(before, after, strict=True)),
        worse=sum(a < b for b, a in zip(before, after, strict=True)),
        left_out=len(one.keys() ^ other.keys()),
        spent=(_spent(old, scored[0], set(shared)), _spent(new, scored[1], set(shared))),
    )


def _spent(found: StoredEvaluation, scored: Sequence[TaskScores], tasks: Container[str]) -> Spending:
    rollouts = [each.usage for task in scored if task.task_id in tasks for each in task.attempts]
    return spending(rollouts, prices=found.prices, seconds=found.seconds)
