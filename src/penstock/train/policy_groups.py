"""Each policy's view of a group: what it sampled, with the rewards that it is credited with.

Policies share no path of a token graph, so a view is a group like any other: advantages, and with them the baseline, are computed
from it as for a run with one policy.
"""

from collections.abc import Collection
from dataclasses import replace

from penstock.records import Attempt, Grade, Group


def group_of(group: Group, policy: str) -> Group:
    """The attempts in which `policy` was asked, with its nodes and steps alone."""
    return replace(group, attempts=tuple(attempt_of(attempt, policy) for attempt in group.attempts if took_part(attempt, policy)))


def took_part(attempt: Attempt, policy: str) -> bool:
    return any(step.policy == policy for step in attempt.steps)


def attempt_of(attempt: Attempt, policy: str) -> Attempt:
    """The nodes and steps of `policy` alone, with the grades that it is credited with."""
    steps = tuple(step for step in attempt.steps if step.policy == policy)
    nodes, indices = {step.node for step in steps}, {step.index for step in steps}
    return replace(
        attempt,
        nodes=tuple(node for node in attempt.nodes if node.id in nodes),
        steps=steps,
        grades=_grades_of(attempt, {step.transcript for step in steps}, indices),
        marks=tuple(mark for mark in attempt.marks if mark.step is None or mark.step in indices),
    )


def _grades_of(attempt: Attempt, transcripts: Collection[str], steps: Collection[int]) -> tuple[Grade, ...]:
    """The grades of its own transcripts; without them the rollout's; without that those of its own steps, else all."""
    own = tuple(grade for grade in attempt.grades if grade.step is None and grade.transcript in transcripts)
    whole = tuple(grade for grade in attempt.grades if grade.step is None and grade.transcript is None)
    own_steps = tuple(grade for grade in attempt.grades if grade.step in steps)
    if own or whole:
        return own or whole
    others = any(grade.step is None for grade in attempt.grades)  # of transcripts that other policies wrote
    return attempt.grades if others or not own_steps else own_steps
