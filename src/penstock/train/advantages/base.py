"""What an advantage takes and returns, and where the rewards of a rollout lie.

An advantage is a function. By default it takes a group and returns the credit of each graded rollout; `over_batch` and `per_token`
make it one that sees all groups of a step, or the tokens of a sequence, and `needing` one that gets continuations too. A second
parameter that is annotated with a `Section` is given the settings of `[train.advantage_settings]`.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast

from penstock.errors import TrainError
from penstock.records import Attempt, Group

Credit = float | Mapping[int, float] | Mapping[str, float]
"""Of one rollout: one number for all of it, a number by step, or a number by transcript. What is not named gets 0."""
Level = Literal["group", "batch", "token"]
Need = Literal["values", "teacher", "branches"]

F = TypeVar("F", bound=Callable[..., Any])

EPSILON = 1e-6


def over_batch(function: F) -> F:
    """Marks an advantage that takes all groups of a step, and returns a list of credit for each."""
    function.level = "batch"  # pyright: ignore[reportFunctionMemberAccess]
    return function


def per_token(*needs: Need) -> Callable[[F], F]:
    """Marks an advantage that takes the `SequenceTokens` of all sequences, and returns a list of numbers for each.

    It needs `values`, of a value head that is trained beside the policy, or the log-probabilities of a `teacher`.
    """

    def mark(function: F) -> F:
        function.level, function.needs = "token", frozenset(needs)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return mark


def needing(*needs: Need) -> Callable[[F], F]:
    """Marks an advantage of groups that needs more than their attempts: `branches`, of the settings in `[rollout]`."""

    def mark(function: F) -> F:
        function.needs = frozenset(needs)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return mark


def level_of(function: Callable[..., Any]) -> Level:
    return getattr(function, "level", "group")


def needs_of(function: Callable[..., Any]) -> frozenset[Need]:
    return getattr(function, "needs", frozenset())


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


def credit_by_step(attempt: Attempt, credit: Credit) -> dict[int, float]:
    """Returns the credit of every step. TrainError if it names a step or transcript that the rollout has not."""
    if not isinstance(credit, Mapping):
        return {step.index: credit for step in attempt.steps}
    known = {step.index for step in attempt.steps} | {step.transcript for step in attempt.steps}
    if unknown := [key for key in credit if key not in known]:
        raise TrainError(f"rollout {attempt.rollout.id} was given credit for {unknown[0]!r}, which is no step or transcript of it")
    named = cast(Mapping[int | str, float], credit)
    return {step.index: named.get(step.index, named.get(step.transcript, 0.0)) for step in attempt.steps}


def step_rewards(attempt: Attempt) -> dict[int, float]:
    """Returns the grades of single steps, summed by step; without those of steps that were not recorded."""
    known = {step.index for step in attempt.steps}
    found = defaultdict[int, float](float)
    for grade in attempt.grades:
        if grade.step in known:
            found[grade.step] += grade.reward
    return dict(found)


def outcome(attempt: Attempt, transcript: str) -> float | None:
    """Returns the reward for how a transcript ended: its own grade, else the rollout's; None if only steps are graded."""
    own = [grade.reward for grade in attempt.grades if grade.step is None and grade.transcript == transcript]
    whole = [grade.reward for grade in attempt.grades if grade.step is None and grade.transcript is None]
    return (own or whole or [None])[-1]


def turns(attempt: Attempt) -> dict[int, tuple[str, int]]:
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
