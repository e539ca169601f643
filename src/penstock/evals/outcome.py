"""The outcome of an evaluation: rewards and pass@k with intervals, ends, and usage. Also opens stored evaluations."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from sys import intern
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from penstock.config import EvalSection
from penstock.errors import ConfigError
from penstock.evals.attempts import CHANNEL, read_groups
from penstock.evals.metrics import Estimate, estimate, pass_at_k
from penstock.evals.spending import Prices, RolloutUsage, Spending, prices_of, rollout_seconds, rollout_usage, spending
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End, Group
from penstock.run.shortfalls import ScoredEnd, Shortfall, shortfalls, shortfalls_json


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutcome:
    """Numbers of an evaluation. A failed attempt has reward 0 and does not pass."""

    tasks: int
    samples: int
    rollouts: int
    """Attempts that have ended."""
    reward: Estimate | None
    """Mean over tasks of the mean over their attempts; None if no attempt has ended."""
    passes: dict[int, Estimate]
    """pass@k by k."""
    components: dict[str, Estimate] = field(default_factory=dict[str, Estimate])
    """The mean of each named part of the reward; an attempt that lacks it counts as 0."""
    ends: dict[str, int]
    reasons: dict[str, dict[str, int]]
    """For each end other than completed: its ten most common messages, with counts."""
    shortfalls: dict[str, Shortfall] = field(default_factory=dict[str, Shortfall])
    """How many attempts failed, were not graded, and were wrong, each with its commonest reason."""
    spent: Spending
    """Usage of the attempts that have ended."""

    @property
    def all_failed(self) -> bool:
        """Whether attempts have ended, and none of them completed."""
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


class EndedAttempt(NamedTuple):
    """An attempt that has ended, without tokens and text, which may not fit in memory for a whole evaluation."""

    end: End
    message: str
    reward: float
    """0 if the attempt failed."""
    usage: RolloutUsage
    components: Mapping[str, float] = MappingProxyType({})
    """Named parts of the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """The attempts of a task that have ended."""

    task_id: str
    row: int
    attempts: tuple[EndedAttempt, ...]
    """At least one."""

    @property
    def rewards(self) -> list[float]:
        return [each.reward for each in self.attempts]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.attempts)

    def mean_of(self, component: str) -> float:
        return sum(each.components.get(component, 0.0) for each in self.attempts) / len(self.attempts)


async def score_tasks(groups: AsyncIterable[Group]) -> list[TaskScores]:
    """Returns the scores of every task with an ended attempt, by row. Keeps one group in memory at a time."""
    return [
        TaskScores(task_id=group.task.id, row=group.seq, attempts=ended)
        async for group in groups
        if (ended := _ended_attempts(group))
    ]


def outcome(
    scored: Sequence[TaskScores], section: EvalSection, *, prices: Prices | None = None, seconds: Mapping[str, float] | None = None
) -> EvalOutcome:
    """Returns the outcome. `seconds` maps rollout ids to durations; pass@k uses only tasks whose attempts have all ended."""
    attempts = [each for task in scored for each in task.attempts]
    whole = [each for each in scored if len(each.attempts) == section.samples]
    return EvalOutcome(
        tasks=len(scored),
        samples=section.samples,
        rollouts=len(attempts),
        reward=estimate([each.mean for each in scored]) if scored else None,
        components={name: estimate([each.mean_of(name) for each in scored]) for name in _component_names(attempts)},
        passes={k: estimate([_pass(each, k, section.passes) for each in whole]) for k in section.k if whole},
        ends=dict(Counter(str(each.end) for each in attempts)),
        reasons=_reasons(attempts),
        shortfalls=shortfalls([ScoredEnd(str(each.end), each.message, each.reward) for each in attempts], section.passes),
        spent=spending([each.usage for each in attempts], prices=prices, seconds=seconds),
    )


def _ended_attempts(group: Group) -> tuple[EndedAttempt, ...]:
    """Interns messages, as many attempts fail with the same one."""
    return tuple(
        EndedAttempt(a.end, intern(a.message), a.reward or 0.0, rollout_usage(a), a.components)
        for a in group.attempts
        if a.end is not None
    )


def _component_names(attempts: Iterable[EndedAttempt]) -> list[str]:
    return list(dict.fromkeys(name for each in attempts for name in each.components))


def _pass(each: TaskScores, k: int, threshold: float) -> float:
    return pass_at_k(len(each.attempts), sum(reward >= threshold for reward in each.rewards), k)


def _reasons(attempts: Iterable[EndedAttempt]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for each in attempts:
        if each.end is not End.COMPLETED:
            found.setdefault(str(each.end), Counter())[each.message] += 1
    return {end: dict(messages.most_common(10)) for end, messages in found.items()}


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
