"""A group and its credit become training sequences: the paths of each rollout's token graph, every sampled token at most once."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from penstock.errors import TrainError
from penstock.records import Attempt, Group, Node, Sequence, Step


class SequencesResult(NamedTuple):
    """What a group gives to train on, and what it does not."""

    sequences: list[Sequence]
    counts: Counter[str]
    """`rollouts` that the loss is a mean over, `tokens` trained, `groups_equal` (no differences to learn from) and
    `groups_ungraded`, rollouts `ungraded`, and steps `masked.<reason>`. Counters of several groups add up."""


class Exactness(NamedTuple):
    """How many sampled tokens can be trained under the very context they were sampled under."""

    exact_tokens: int
    sampled_tokens: int
    broken: Counter[str]
    """The other tokens, by reason."""


class Graph(NamedTuple):
    """The token graph of one rollout, by number."""

    nodes: dict[int, Node]
    steps: dict[int, Step]
    """In the order of their indices: a step comes after those it continues."""
    parents: dict[int, int | None]
    """Step → the step that it continues, None at a root; a step whose context is not wholly recorded is missing."""
    flaws: dict[int, str]
    """Step → why its tokens must not be trained."""


def sequences(group: Group, advantages: Iterable[float], *, divisor: float | None = None) -> SequencesResult:
    """One sequence per leaf of each graded rollout's graph, cut after its last trained token.

    `advantages` are those of `group.graded`. A reply that lies on several paths is trained on the first and context on the others.
    Tokens of a rollout share a weight: one over their number, so that every rollout weighs the same, or one over `divisor`.
    A group without any advantage is skipped, and with it its rollouts: the loss is a mean over those that can teach something.
    """
    credit = list(advantages)
    _check(group, credit)
    counts = Counter(ungraded=len(group.attempts) - len(credit))
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


def exactness(attempt: Attempt) -> Exactness:
    """Check every step's record: aligned columns, possible numbers, and a context recorded without a gap."""
    flaws = _graph(attempt).flaws
    sizes = {step.index: max(len(step.completion_ids), len(step.logprobs), len(step.versions)) for step in attempt.steps}
    broken: Counter[str] = Counter()
    for index, reason in flaws.items():
        broken[reason] += sizes[index]
    sampled = sum(sizes.values())
    return Exactness(sampled - broken.total(), sampled, broken)


def _check(group: Group, credit: list[float]) -> None:
    if len(credit) != len(group.graded):
        raise TrainError(f"group {group.id} has {len(group.graded)} graded rollouts but was given {len(credit)} advantages")
    if not all(math.isfinite(value) for value in credit):
        raise TrainError(f"group {group.id} was given the advantages {credit}; each must be finite")


def _of_attempt(attempt: Attempt, advantage: float, divisor: float | None) -> SequencesResult:
    graph = _graph(attempt)
    reasons = {index: _mask(step, advantage, graph) for index, step in graph.steps.items()}
    counts = Counter(f"masked.{reason}" for reason in reasons.values() if reason)
    left = {index for index, reason in reasons.items() if reason is None}
    counts["tokens"] = sum(len(graph.steps[index].completion_ids) for index in left)
    weight = 1.0 / (divisor or counts["tokens"] or 1)
    inner = set(graph.parents.values())
    made: list[Sequence] = []
    for leaf in (index for index in graph.parents if index not in inner):
        path = _path(graph, leaf)
        if mine := left.intersection(path):
            left -= mine
            made.append(_sequence(attempt, graph, path, mine, advantage=advantage, weight=weight))
    return SequencesResult(made, counts)


def _mask(step: Step, advantage: float, graph: Graph) -> str | None:
    """Why a step's tokens are not trained; None if they are."""
    if reason := graph.flaws.get(step.index):
        return reason
    if not step.completion_ids:
        return "empty"
    if step.finish in ("cancelled", "error"):
        return step.finish
    if step.sampling.temperature == 0:
        return "greedy"
    return None if advantage else "zero_advantage"


def _graph(attempt: Attempt) -> Graph:
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in sorted(attempt.steps, key=lambda step: step.index)}
    graph = Graph(nodes, steps, {}, {})
    for index, step in steps.items():
        node = nodes.get(step.node)
        if node is None or not (node.parent is None or node.parent in graph.parents):
            graph.flaws[index] = "context_missing"
            continue
        graph.parents[index] = node.parent
        if reason := _flaw(step, node):
            graph.flaws[index] = reason
        elif node.parent in graph.flaws:
            graph.flaws[index] = "context_flawed"
    return graph


def _flaw(step: Step, node: Node) -> str | None:
    """What is impossible in the record of one step, seen by itself."""
    if not len(step.completion_ids) == len(step.logprobs) == len(step.versions):
        return "misaligned"
    if not all(math.isfinite(value) and value <= 1e-3 for value in step.logprobs):  # a rounded logprob may be just above 0
        return "bad_logprob"
    if min((*step.completion_ids, *node.token_ids, *step.versions), default=0) < 0:
        return "bad_token"
    return "context_missing" if node.parent is None and not node.token_ids else None


def _path(graph: Graph, leaf: int) -> list[int]:
    """The steps from the root to `leaf`."""
    path: list[int] = []
    at: int | None = leaf
    while at is not None:
        path.append(at)
        at = graph.parents[at]
    return path[::-1]


def _sequence(attempt: Attempt, graph: Graph, path: list[int], mine: set[int], *, advantage: float, weight: float) -> Sequence:
    ids: list[int] = []
    trained: list[bool] = []
    logprobs: list[float] = []
    temperatures: list[float] = []
    versions: list[int] = []
    last = max(path.index(index) for index in mine)
    for index in path[: last + 1]:
        step = graph.steps[index]
        glue, reply = graph.nodes[step.node].token_ids, step.completion_ids
        credited = index in mine
        ids += glue + reply
        trained += [False] * len(glue) + [credited] * len(reply)
        logprobs += [0.0] * len(glue) + (list(step.logprobs) if credited else [0.0] * len(reply))
        temperatures += [1.0] * len(glue) + [step.sampling.temperature if credited else 1.0] * len(reply)
        versions += [-1] * len(glue) + (list(step.versions) if credited else [-1] * len(reply))
    return Sequence(
        rollout_id=attempt.rollout.id,
        group_id=attempt.rollout.group_id,
        token_ids=tuple(ids),
        trained=tuple(trained),
        logprobs=tuple(logprobs),
        temperatures=tuple(temperatures),
        advantages=tuple(advantage if flag else 0.0 for flag in trained),
        weight=weight,
        versions=tuple(versions),
    )
