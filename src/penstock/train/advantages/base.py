"""What an advantage takes and returns, and where the rewards of a rollout lie.

An advantage is a function. By default it takes a group and returns the credit of each graded rollout; `over_batch` and `per_token`
make it one that sees all groups of a step, or the tokens of a sequence, and `needing` one that gets continuations too. A second
parameter that is annotated with a `Section` is given the settings of `[train.advantage_settings]`.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel

from penstock.errors import TrainError
from penstock.records import Group, Rollout

Credit = float | Mapping[int, float] | Mapping[str, float]
"""Of one rollout: one number for all of it, a number by step, or a number by transcript. What is not named gets 0."""
Level = Literal["group", "batch", "token"]
Need = Literal["values", "teacher", "branches"]

Mean = Literal["rollout", "token", "constant"]

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class AlgorithmFunction:
    """An advantage or a loss, with what the trainer must know about it. Plain functions have all defaults."""

    function: Callable[..., Any]
    level: Level = "group"
    """What an advantage takes: a group, all groups of a step, or the tokens of all sequences."""
    needs: frozenset[Need] = frozenset()
    mean: Mean | None = None
    """What the loss is a mean over in its paper; None for the mean over each rollout's tokens. That of the loss counts first."""
    whole_sequences: bool = False
    """Whether a loss takes all tokens of a batch at once."""
    settings: BaseModel | None = None
    """The last argument of every call; None passes none."""

    def __call__(self, *given: Any) -> Any:
        return self.function(*given) if self.settings is None else self.function(*given, self.settings)


def described(function: Callable[..., Any]) -> AlgorithmFunction:
    return function if isinstance(function, AlgorithmFunction) else AlgorithmFunction(function)


def over_batch(function: Callable[..., Any]) -> AlgorithmFunction:
    """Marks an advantage that takes all groups of a step, and returns a list of credit for each."""
    return replace(described(function), level="batch")


def per_token(*needs: Need) -> Callable[[Callable[..., Any]], AlgorithmFunction]:
    """Marks an advantage that takes the `SequenceTokens` of all sequences, and returns a list of numbers for each.

    It needs `values`, of a value head that is trained along with the policy, or the log-probabilities of a `teacher`.
    """
    return lambda function: replace(described(function), level="token", needs=frozenset(needs))


def needing(*needs: Need) -> Callable[[Callable[..., Any]], AlgorithmFunction]:
    """Marks an advantage of groups that needs more than their rollouts: `branches`, of the settings in `[rollout]`."""
    return lambda function: replace(described(function), needs=frozenset(needs))


def mean_over(mean: Mean) -> Callable[[Callable[..., Any]], AlgorithmFunction]:
    """Marks an advantage or a loss whose paper takes another mean than that over each rollout's tokens."""
    return lambda function: replace(described(function), mean=mean)


class SequenceTokens(NamedTuple):
    """The trained tokens of a sequence in order; every list has a number for each."""

    rollout_id: str
    steps: list[int]
    rewards: list[float]
    """A step's grade at its last token, the grade of the transcript or rollout at the last token of the sequence."""
    logprobs: list[float]
    """The engine's."""
    values: list[float]
    """What the value head expects of the rest of the rollout before the token; empty unless needed."""
    teacher: list[float]
    """The teacher's log-probabilities; empty unless needed."""
    recomputed: Sequence[bool] = ()
    """Whether `logprobs` is unknown, and 0; empty if all are known."""


def credit_by_step(attempt: Rollout, credit: Credit) -> dict[int, float]:
    """Returns the credit of every step. TrainError if it names a step or transcript that the rollout has not."""
    if not isinstance(credit, Mapping):
        return {step.index: credit for step in attempt.steps}
    known = {step.index for step in attempt.steps} | {step.transcript for step in attempt.steps}
    if unknown := [key for key in credit if key not in known]:
        raise TrainError(f"rollout {attempt.ref.id} was given credit for {unknown[0]!r}, which is no step or transcript of it")
    named = cast(Mapping[int | str, float], credit)
    return {step.index: named.get(step.index, named.get(step.transcript, 0.0)) for step in attempt.steps}


def step_rewards(attempt: Rollout) -> dict[int, float]:
    """Returns the grades of single steps, summed by step; without those of steps that were not recorded."""
    known = {step.index for step in attempt.steps}
    found = defaultdict[int, float](float)
    for grade in attempt.grades:
        if grade.step in known:
            found[grade.step] += grade.reward
    return dict(found)


def outcome(attempt: Rollout, transcript: str) -> float | None:
    """Returns the reward for how a transcript ended: its own grade, else the rollout's; None if only steps are graded."""
    own = [grade.reward for grade in attempt.grades if grade.step is None and grade.transcript == transcript]
    whole = [grade.reward for grade in attempt.grades if grade.step is None and grade.transcript is None]
    return (own or whole or [None])[-1]


def turns(attempt: Rollout) -> dict[int, tuple[str, int]]:
    """Returns the transcript of each step, and its place among the steps of that transcript, from 0 on."""
    counts, found = defaultdict[str, int](int), dict[int, tuple[str, int]]()
    for step in sorted(attempt.steps, key=lambda step: step.index):
        found[step.index] = step.transcript, counts[step.transcript]
        counts[step.transcript] += 1
    return found


def centred(values: Iterable[float], *, scaled: bool = True) -> list[float]:
    """Returns each value less the mean, over the population standard deviation if `scaled`; zeros where all are the same."""
    given = list(values)
    if len(set(given)) < 2:
        return [0.0] * len(given)
    mean, spread = statistics.fmean(given), statistics.pstdev(given) + EPSILON if scaled else 1.0
    return [(value - mean) / spread for value in given]


def equal(group: Group) -> bool:
    """Whether all graded rollouts have the same reward, so that there is nothing to compare."""
    return len(set(group.rewards)) < 2
