"""A group and its credit become training sequences: the paths of each rollout's token graph, every sampled token at most once."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from penstock.errors import TrainError
from penstock.records import Attempt, Group, Sequence, Step
from penstock.train.exactness import Graph, read_graph, why_untrainable


class SequencesResult(NamedTuple):
    """What a group gives to train on, and what it does not."""

    sequences: list[Sequence]
    counts: Counter[str]
    """`rollouts` that the loss is a mean over, `tokens` trained, `groups_equal` (no differences to learn from) and
    `groups_ungraded`, rollouts `ungraded` and `curated`, and steps `masked.<reason>`. Counters of several groups add up."""


def sequences(group: Group, advantages: Iterable[float], *, divisor: float | None = None) -> SequencesResult:
    """One sequence per leaf of each graded rollout's graph, cut after its last trained token.

    `advantages` are those of `group.graded`. A reply that lies on several paths is trained on the first and context on the others.
    Tokens of a rollout share a weight: one over their number, so that every rollout weighs the same, or one over `divisor`.
    A group without any advantage is skipped, and with it its rollouts: the loss is a mean over those that can teach something.
    """
    credit = list(advantages)
    _check(group, credit)
    out = sum(attempt.curated_out for attempt in group.attempts)
    counts = Counter({"ungraded": len(group.attempts) - len(credit) - out, "curated": out})
    if not any(credit):
        counts["groups_equal" if credit else "groups_ungraded"] += 1
        return SequencesResult([], counts)
    counts["rollouts"] = len(credit)
    made: list[Sequence] = []
    for attempt, advantage in zip(group.graded, credit, strict=True):
        part = _of_attempt(attempt, advantage, divisor)
        made += part.sequences
        counts += part.counts
    return SequencesResult(made, counts)


def _check(group: Group, credit: list[float]) -> None:
    if len(credit) != len(group.graded):
        raise TrainError(f"group {group.id} has {len(group.graded)} graded rollouts but was given {len(credit)} advantages")
    if not all(math.isfinite(value) for value in credit):
        raise TrainError(f"group {group.id} was given the advantages {credit}; each must be finite")


def _of_attempt(attempt: Attempt, advantage: float, divisor: float | None) -> SequencesResult:
    graph = read_graph(attempt)
    qualities = _qualities(attempt)
    reasons = {index: _mask(step, advantage, graph, qualities[index]) for index, step in graph.steps.items()}
    counts = Counter(f"masked.{reason}" for reason in reasons.values() if reason)
    left = {index for index, reason in reasons.items() if reason is None}
    counts["tokens"] = sum(len(graph.steps[index].completion_ids) for index in left)
    weight = 1.0 / (divisor or counts["tokens"] or 1)
    made: list[Sequence] = []
    for path in graph.paths:
        if mine := left.intersection(path):
            left -= mine
            credit = {index: advantage * qualities[index] for index in mine}
            made.append(_sequence(attempt, graph, path, credit, weight=weight))
    return SequencesResult(made, counts)


def _mask(step: Step, advantage: float, graph: Graph, quality: float) -> str | None:
    """Why a step's tokens are not trained; None if they are."""
    without_credit = "zero_advantage" if not advantage else None if quality else "curated"
    return why_untrainable(step, graph) or without_credit


def _qualities(attempt: Attempt) -> dict[int, float]:
    """By step: what its credit is multiplied by; 0 where a curator took it out."""
    marks = {mark.step: mark for mark in attempt.marks}
    whole = marks[None].quality if None in marks else 1.0
    own = {mark.step: mark.quality if mark.trainable else 0.0 for mark in attempt.marks}
    return {step.index: whole * own.get(step.index, 1.0) for step in attempt.steps}


def _sequence(attempt: Attempt, graph: Graph, path: list[int], credit: dict[int, float], *, weight: float) -> Sequence:
    """The path up to its last step with credit, which every token of such a step gets."""
    last = max(place for place, index in enumerate(path) if index in credit)
    ids: list[int] = []
    credited: list[tuple[slice, Step]] = []
    for index in path[: last + 1]:
        step = graph.steps[index]
        ids += graph.nodes[step.node].token_ids
        if index in credit:
            credited.append((slice(len(ids), len(ids) + len(step.completion_ids)), step))
        ids += step.completion_ids
    trained, logprobs, versions = [False] * len(ids), [0.0] * len(ids), [-1] * len(ids)
    temperatures, advantages = [1.0] * len(ids), [0.0] * len(ids)
    for reply, step in credited:
        size = len(step.completion_ids)
        trained[reply], logprobs[reply], versions[reply] = [True] * size, step.logprobs, step.versions
        temperatures[reply], advantages[reply] = [step.sampling.temperature] * size, [credit[step.index]] * size
    return Sequence(
        rollout_id=attempt.rollout.id,
        group_id=attempt.rollout.group_id,
        token_ids=tuple(ids),
        trained=tuple(trained),
        logprobs=tuple(logprobs),
        temperatures=tuple(temperatures),
        advantages=tuple(advantages),
        weight=weight,
        versions=tuple(versions),
    )
