"""Which recorded tokens can be computed again under a policy version, and the sequences that do it."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from penstock.records import Attempt, Sequence, Step
from penstock.train.exactness import Graph


class Token(NamedTuple):
    """One sampled token with the log-probability that was recorded of it and can be computed again."""

    rollout_id: str
    step: int
    place: int
    """In the reply, from 0."""
    version: int
    logprob: float


class Probes(NamedTuple):
    """What is to be recomputed under one version."""

    sequences: list[Sequence]
    """Nothing is credited here: `advantages` hold the place of each token in `tokens` instead."""
    tokens: list[Token]


def versions(read: Iterable[tuple[Attempt, Graph]]) -> Counter[int]:
    """How many tokens each version sampled, in steps whose record has no flaw."""
    counted: Counter[int] = Counter()
    for _, graph in read:
        for step in graph.steps.values():
            if step.index not in graph.flaws:
                counted.update(step.versions)
    return counted


def probe(read: Iterable[tuple[Attempt, Graph]], version: int) -> Probes:
    """One sequence per path with tokens of `version`, each token on the first path that it is on."""
    probes = Probes([], [])
    for attempt, graph in read:
        left = {i for i, step in graph.steps.items() if version in step.versions and i not in graph.flaws}
        for path in graph.paths:
            if mine := left.intersection(path):
                left -= mine
                probes.sequences.append(_sequence(attempt, graph, path, mine, version, probes.tokens))
    return probes


def _sequence(attempt: Attempt, graph: Graph, path: list[int], mine: set[int], version: int, tokens: list[Token]) -> Sequence:
    ids: list[int] = []
    numbers: list[float | None] = []
    heats: list[float] = []
    for index in path[: max(path.index(index) for index in mine) + 1]:
        step = graph.steps[index]
        glue = graph.nodes[step.node].token_ids
        logprobs, heat = _recomputable(step)
        ids += glue + step.completion_ids
        numbers += [None] * len(glue)
        heats += [1.0] * len(glue) + [heat] * len(step.completion_ids)
        for place in range(len(step.completion_ids)):
            wanted = index in mine and step.versions[place] == version
            numbers.append(float(len(tokens)) if wanted else None)
            if wanted:
                tokens.append(Token(attempt.rollout.id, index, place, version, logprobs[place]))
    return Sequence(
        rollout_id=attempt.rollout.id,
        group_id=attempt.rollout.group_id,
        token_ids=tuple(ids),
        trained=tuple(number is not None for number in numbers),
        logprobs=(0.0,) * len(ids),
        temperatures=tuple(heats),
        advantages=tuple(number or 0.0 for number in numbers),
        weight=1.0,
    )


def _recomputable(step: Step) -> tuple[tuple[float, ...], float]:
    """The recorded log-probabilities that a forward pass gives again, and the temperature at which it does.

    What truncated sampling renormalised, and what greedy sampling made certain, is checked by the plain softmax.
    """
    if step.sampling.temperature > 0 and not step.sampling.truncated:
        return step.logprobs, step.sampling.temperature
    return step.logprobs if step.full_logprobs is None else step.full_logprobs, 1.0
