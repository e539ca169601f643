"""The outcome of an evaluation: rewards and pass@k with intervals, ends and usage. Opens and compares stored evaluations."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from sys import intern
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from penstock.config import EvalSection
from penstock.errors import ConfigError
from penstock.evals.metrics import Difference, Estimate, difference, estimate, pass_at_k
from penstock.evals.spending import Prices, RolloutUsage, Spending, prices_of, rollout_seconds, rollout_usage, spending
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End, Group
from penstock.run.shortfalls import ScoredEnd, Shortfall, shortfalls, shortfalls_json

CHANNEL = "eval"
PAGE_GROUPS = 4
"""Groups in memory at once: larger pages are no faster, and groups of long agents are large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutcome:
    """Numbers of an evaluation. A failed rollout has reward 0 and does not pass."""

    tasks: int
    samples: int
    rollouts: int
    """Rollouts that have ended."""
    reward: Estimate | None
    """Mean over tasks of the mean over their rollouts; None if no rollout has ended."""
    passes: dict[int, Estimate]
    """pass@k by k."""
    components: dict[str, Estimate] = field(default_factory=dict[str, Estimate])
    """The mean of each named part of the reward; a rollout that lacks it counts as 0."""
    ends: dict[str, int]
    reasons: dict[str, dict[str, int]]
    """For each end other than completed: its ten most common messages, with counts."""
    shortfalls: dict[str, Shortfall] = field(default_factory=dict[str, Shortfall])
    """How many rollouts failed, were not graded, and were wrong, each with its most common reason."""
    spent: Spending
    """Usage of the rollouts that have ended."""

    @property
    def all_failed(self) -> bool:
        """Whether rollouts have ended, and none of them completed."""
        return self.rollouts > 0 and not self.ends.get(End.COMPLETED)

    def as_json(self) -> dict[str, Any]:
        """Returns plain JSON values, with the fields of `spent` at the top level."""
        own = asdict(self)
        del own["spent"]
        passes = {str(k): value._asdict() for k, value in self.passes.items()}
        parts = {name: value._asdict() for name, value in self.components.items()}
        short = shortfalls_json(self.shortfalls)
        own |= {"reward": self.reward and self.reward._asdict(), "passes": passes, "components": parts, "shortfalls": short}
        return own | self.spent.as_json()


class ScoredRollout(NamedTuple):
    """A rollout that has ended, without tokens and text, which may not fit in memory for a whole evaluation."""

    end: End
    message: str
    reward: float
    """0 if the rollout failed."""
    usage: RolloutUsage
    components: Mapping[str, float] = MappingProxyType({})
    """Named parts of the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """The rollouts of a task that have ended."""

    task_id: str
    row: int
    rollouts: tuple[ScoredRollout, ...]
    """At least one."""

    @property
    def rewards(self) -> list[float]:
        return [each.reward for each in self.rollouts]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rollouts)

    def mean_of(self, component: str) -> float:
        return sum(each.components.get(component, 0.0) for each in self.rollouts) / len(self.rollouts)


async def score_tasks(groups: AsyncIterable[Group]) -> list[TaskScores]:
    """Returns the scores of every task with an ended rollout, by row. Keeps one group in memory at a time."""
    return [
        TaskScores(task_id=group.task.id, row=group.seq, rollouts=ended)
        async for group in groups
        if (ended := _ended_rollouts(group))
    ]


def outcome(
    scored: Sequence[TaskScores], section: EvalSection, *, prices: Prices | None = None, seconds: Mapping[str, float] | None = None
) -> EvalOutcome:
    """Returns the outcome. `seconds` maps rollout ids to durations; pass@k uses only tasks whose rollouts have all ended."""
    rollouts = [each for task in scored for each in task.rollouts]
    whole = [each for each in scored if len(each.rollouts) == section.samples]
    return EvalOutcome(
        tasks=len(scored),
        samples=section.samples,
        rollouts=len(rollouts),
        reward=estimate([each.mean for each in scored]) if scored else None,
        components={name: estimate([each.mean_of(name) for each in scored]) for name in _component_names(rollouts)},
        passes={k: estimate([_pass(each, k, section.passes) for each in whole]) for k in section.k if whole},
        ends=dict(Counter(str(each.end) for each in rollouts)),
        reasons=_reasons(rollouts),
        shortfalls=shortfalls([ScoredEnd(str(each.end), each.message, each.reward) for each in rollouts], section.passes),
        spent=spending([each.usage for each in rollouts], prices=prices, seconds=seconds),
    )


def _ended_rollouts(group: Group) -> tuple[ScoredRollout, ...]:
    """Interns messages, as many rollouts fail with the same one."""
    return tuple(
        ScoredRollout(a.end, intern(a.message), a.reward or 0.0, rollout_usage(a), a.components)
        for a in group.rollouts
        if a.end is not None
    )


def _component_names(rollouts: Iterable[ScoredRollout]) -> list[str]:
    return list(dict.fromkeys(name for each in rollouts for name in each.components))


def _pass(each: TaskScores, k: int, threshold: float) -> float:
    return pass_at_k(len(each.rollouts), sum(reward >= threshold for reward in each.rewards), k)


def _reasons(rollouts: Iterable[ScoredRollout]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for each in rollouts:
        if each.end is not End.COMPLETED:
            found.setdefault(str(each.end), Counter())[each.message] += 1
    return {end: dict(messages.most_common(10)) for end, messages in found.items()}


async def read_groups(pool: Pool) -> AsyncGenerator[Group]:
    """Yields all groups of the evaluation, by row; none is kept once the next one is asked for."""
    first = 0
    while page := await pool.groups(CHANNEL, first_seq=first, limit=PAGE_GROUPS):
        first = page[-1].seq + 1
        while page:
            yield page.pop(0)


class StoredEvaluation(NamedTuple):
    """An evaluation opened for reading."""

    config: dict[str, Any]
    summary: dict[str, Any]
    pool: Pool
    seconds: Mapping[str, float] = MappingProxyType({})
    """Known durations of rollouts, by id."""

    @property
    def prices(self) -> Prices | None:
        """Prices in the summary of the last run, which may have changed them, else those in the config."""
        prices = self.summary.get("prices")
        return Prices(**prices) if prices else prices_of(self.config)

    def groups(self) -> AsyncGenerator[Group]:
        return read_groups(self.pool)


@asynccontextmanager
async def open_evaluation(folder: Path) -> AsyncGenerator[StoredEvaluation]:
    """Opens a folder that `penstock eval run` made. Raises ConfigError if it is not one."""
    try:
        config: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())["config"]
        file = folder / "summary.json"
        summary: dict[str, Any] = orjson.loads(file.read_bytes()) if file.exists() else {}
    except (OSError, ValueError, LookupError, TypeError) as cause:
        raise _not_an_evaluation(folder) from cause
    pool: Pool = POOLS.load(config["pool"]["name"])(folder, url=config["pool"].get("url", ""))
    try:
        if not (await pool.stats(CHANNEL)).groups:
            raise _not_an_evaluation(folder)
        yield StoredEvaluation(config, summary, pool, rollout_seconds(folder / "events.jsonl"))
    finally:
        await pool.close()


def _not_an_evaluation(folder: Path) -> ConfigError:
    return ConfigError(f"{folder}: not an evaluation; give a folder that `penstock eval run` made, such as runs/evals/multiply")


# Comparison


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
    rollouts = [each.usage for task in scored if task.task_id in tasks for each in task.rollouts]
    return spending(rollouts, prices=found.prices, seconds=found.seconds)
