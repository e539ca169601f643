"""What an evaluation came to: rewards and pass@k with their intervals, ends, and what was spent."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.config import EvalSection
from penstock.evals.metrics import Estimate, estimate, pass_at_k
from penstock.evals.spending import Prices, Spending, spending
from penstock.records import Attempt, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One task's attempts."""

    task_id: str
    row: int
    rewards: tuple[float, ...]
    """Of the attempts that have ended, 0 for one that failed."""

    @property
    def mean(self) -> float:
        """Over the attempts."""
        return sum(self.rewards) / len(self.rewards)


def scores(groups: Iterable[Group]) -> list[Scores]:
    """Of every task that has an attempt which ended, by row."""
    found = [Scores(task_id=g.task.id, row=g.seq, rewards=tuple(reward_of(a) for a in ended(g))) for g in groups]
    return [each for each in found if each.rewards]


def outcome(
    groups: Sequence[Group], section: EvalSection, *, prices: Prices | None = None, seconds: Mapping[str, float] | None = None
) -> Outcome:
    """All of it, from what the pool holds; `seconds` are those of rollouts by their id."""
    scored = scores(groups)
    attempts = [attempt for group in groups for attempt in ended(group)]
    whole = [each for each in scored if len(each.rewards) == section.samples]
    return Outcome(
        tasks=len(scored),
        samples=section.samples,
        rollouts=len(attempts),
        reward=estimate([each.mean for each in scored]) if scored else None,
        passes={k: estimate([_pass(each, k, section.passes) for each in whole]) for k in section.k if whole},
        ends=dict(Counter(str(attempt.end) for attempt in attempts)),
        reasons=_reasons(attempts),
        spent=spending(attempts, prices=prices, seconds=seconds),
    )


def ended(group: Group) -> list[Attempt]:
    """Attempts that count."""
    return [attempt for attempt in group.attempts if attempt.end is not None]


def reward_of(attempt: Attempt) -> float:
    """0 for one that failed."""
    return attempt.reward or 0.0


def _pass(each: Scores, k: int, threshold: float) -> float:
    return pass_at_k(len(each.rewards), sum(reward >= threshold for reward in each.rewards), k)


def _reasons(attempts: Iterable[Attempt]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for attempt in attempts:
        if attempt.end != "completed":
            found.setdefault(str(attempt.end), Counter())[attempt.message] += 1
    return {end: dict(messages.most_common(10)) for end, messages in found.items()}
