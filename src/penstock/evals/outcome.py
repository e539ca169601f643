"""The outcome of an evaluation: rewards and pass@k with their intervals, ends, and usage; and evaluations opened for reading."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutcome:
    """An evaluation in numbers. An attempt that failed has reward 0 and does not pass."""

    tasks: int
    samples: int
    rollouts: int
    """Attempts that have ended."""
    reward: Estimate | None
    """Mean over tasks of the mean over their attempts; None before the first."""
    passes: dict[int, Estimate]
    """pass@k by k."""
    ends: dict[str, int]
    reasons: dict[str, dict[str, int]]
    """Per end other than completed: its messages and how often each came."""
    spent: Spending
    """By the attempts that have ended."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, estimates by name; what was spent stands beside the rest."""
        own = asdict(self)
        del own["spent"]
        passes = {str(k): value._asdict() for k, value in self.passes.items()}
        return own | {"reward": self.reward and self.reward._asdict(), "passes": passes} | self.spent.as_json()


class EndedAttempt(NamedTuple):
    """An attempt that has ended, without its tokens and text: those of a whole evaluation may not fit in memory."""

    end: End
    message: str
    reward: float
    """0 for one that failed."""
    usage: RolloutUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """A task's attempts that have ended."""

    task_id: str
    row: int
    attempts: tuple[EndedAttempt, ...]
    """At least one."""

    @property
    def rewards(self) -> list[float]:
        """Of the attempts, in the same order."""
        return [each.reward for each in self.attempts]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.attempts)


async def score_tasks(groups: AsyncIterable[Group]) -> list[TaskScores]:
    """Returns the scores of every task with an ended attempt, by row; a group is freed before the next one is read."""
    return [
        TaskScores(task_id=group.task.id, row=group.seq, attempts=ended)
        async for group in groups
        if (ended := _ended_attempts(group))
    ]


def outcome(
    scored: Sequence[TaskScores], section: EvalSection, *, prices: Prices | None = None, seconds: Mapping[str, float] | None = None
) -> EvalOutcome:
    """Returns the outcome; `seconds` are the rollouts' durations by id."""
    attempts = [each for task in scored for each in task.attempts]
    whole = [each for each in scored if len(each.attempts) == section.samples]
    return EvalOutcome(
        tasks=len(scored),
        samples=section.samples,
        rollouts=len(attempts),
        reward=estimate([each.mean for each in scored]) if scored else None,
        passes={k: estimate([_pass(each, k, section.passes) for each in whole]) for k in section.k if whole},
        ends=dict(Counter(str(each.end) for each in attempts)),
        reasons=_reasons(attempts),
        spent=spending([each.usage for each in attempts], prices=prices, seconds=seconds),
    )


def _ended_attempts(group: Group) -> tuple[EndedAttempt, ...]:
    """Messages are interned: many attempts fail with the same one."""
    return tuple(
        EndedAttempt(a.end, intern(a.message), a.reward or 0.0, rollout_usage(a)) for a in group.attempts if a.end is not None
    )


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
    """Durations of rollouts by id, where known."""

    @property
    def prices(self) -> Prices | None:
        """Those of its last run, which may have changed them, else those that it was started with."""
        prices = self.summary.get("prices")
        return Prices(**prices) if prices else prices_of(self.config)

    def groups(self) -> AsyncGenerator[Group]:
        return read_groups(self.pool)


@asynccontextmanager
async def open_evaluation(folder: Path) -> AsyncGenerator[StoredEvaluation]:
    """Open a folder that `penstock eval run` made; ConfigError if it is none."""
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
