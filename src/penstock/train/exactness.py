"""Whether each sampled token can be trained under the very context that it was sampled under.

The gateway keeps, with each step, a digest of the ids that the engine saw and sampled. Here the same digest is made from the ids
that training would use, read off the token graph. A step for which the two differ is never trained.
"""

import math
from collections import Counter
from hashlib import blake2b
from typing import NamedTuple

from penstock.codec import ids_hash
from penstock.records import Attempt, Node, Step

LARGEST_ID = 2**31 - 1
"""Ids are kept and hashed as int32."""


class Exactness(NamedTuple):
    """How many sampled tokens can be trained under the very context they were sampled under."""

    exact_tokens: int
    sampled_tokens: int
    inexact: Counter[str]
    """The other tokens, by reason."""
    unhashed_tokens: int
    """Of the exact ones, those recorded without a digest: their record has no gap and no flaw, which is all that can be said."""

    @property
    def rate(self) -> float | None:
        """Share of the exact ones; None where nothing was sampled."""
        return self.exact_tokens / self.sampled_tokens if self.sampled_tokens else None


class Graph(NamedTuple):
    """The token graph of one rollout, by number."""

    nodes: dict[int, Node]
    steps: dict[int, Step]
    """In the order of their indices: a step comes after those it continues."""
    parents: dict[int, int | None]
    """Step → the step that it continues, None at a root; a step whose context is not wholly recorded is missing."""
    flaws: dict[int, str]
    """Step → why its tokens must not be trained."""

    @property
    def paths(self) -> list[list[int]]:
        """The steps from a root to each leaf, in the order of the leaves."""
        inner = set(self.parents.values())
        return [self._path(leaf) for leaf in self.parents if leaf not in inner]

    def _path(self, leaf: int) -> list[int]:
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = self.parents[at]
        return path[::-1]


def exactness(*attempts: Attempt) -> Exactness:
    """Check every step's record: aligned columns, possible numbers, and a context that is the one recorded."""
    sampled, unhashed = 0, 0
    inexact: Counter[str] = Counter()
    for attempt in attempts:
        flaws = read_graph(attempt).flaws
        for step in attempt.steps:
            size = sampled_tokens(step)
            sampled += size
            if reason := flaws.get(step.index):
                inexact += Counter({reason: size})  # which leaves a count of 0 out
            elif not step.context:
                unhashed += size
    return Exactness(sampled - inexact.total(), sampled, inexact, unhashed)


def sampled_tokens(step: Step) -> int:
    """How many tokens were sampled, as far as any of the columns remembers."""
    return max(len(step.completion_ids), len(step.logprobs), len(step.versions))


def breaks(*attempts: Attempt) -> Counter[str]:
    """How often a caller's messages had to be rendered anew although the rollout had earlier steps, by reason.

    What is sampled after a break is exact all the same: it is trained under the new rendering.
    """
    return Counter(node.reason for attempt in attempts for node in attempt.nodes if node.reason)


def read_graph(attempt: Attempt) -> Graph:
    """The token graph as recorded; work is proportional to its tokens, however many paths share them."""
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in sorted(attempt.steps, key=lambda step: step.index)}
    graph, contexts = Graph(nodes, steps, {}, {}), _Contexts()
    for index, step in steps.items():
        node = nodes.get(step.node)
        if node is None or not (node.parent is None or node.parent in graph.parents):
            graph.flaws[index] = "context_missing"
        elif not _are_ids((*node.token_ids, *step.completion_ids)):
            graph.flaws[index] = "bad_token"
        else:
            graph.parents[index] = node.parent
            digest = contexts.add(step, node)
            if reason := _flaw(step, node) or _difference(step, digest, flawed=node.parent in graph.flaws):
                graph.flaws[index] = reason
    return graph


def why_untrainable(step: Step, graph: Graph) -> str | None:
    """Why a step's tokens cannot be trained, whatever their credit; None if they can."""
    if reason := graph.flaws.get(step.index):
        return reason
    if not step.completion_ids:
        return "empty" if step.usage is None else "relayed"
    if step.finish in ("cancelled", "error"):
        return step.finish
    return "greedy" if step.sampling.temperature == 0 else None


class _Contexts:
    """Hashes of the paths through a graph, each grown from the one before it."""

    def __init__(self) -> None:
        self._prompts: dict[int, blake2b] = {}
        self._replies: dict[int, blake2b] = {}

    def add(self, step: Step, node: Node) -> str:
        """The digest of the path up to the end of this step's reply."""
        if node.id not in self._prompts:
            before = None if node.parent is None else self._replies[node.parent]
            self._prompts[node.id] = ids_hash(before, node.token_ids)
        self._replies[step.index] = ids_hash(self._prompts[node.id], step.completion_ids)
        return self._replies[step.index].hexdigest()


def _are_ids(numbers: tuple[int, ...]) -> bool:
    return min(numbers, default=0) >= 0 and max(numbers, default=0) <= LARGEST_ID


def _flaw(step: Step, node: Node) -> str | None:
    """What is impossible in the record of one step, seen by itself; one that an endpoint gave as text claims no tokens."""
    if step.usage is not None and not step.completion_ids:
        return None
    columns = (step.logprobs, step.versions, step.logprobs if step.full_logprobs is None else step.full_logprobs)
    if any(len(column) != len(step.completion_ids) for column in columns):
        return "misaligned"
    if not all(math.isfinite(value) and value <= 1e-3 for value in step.logprobs):  # a rounded logprob may be just above 0
        return "bad_logprob"
    if min(step.versions, default=0) < 0:
        return "bad_version"
    return "context_missing" if node.parent is None and not node.token_ids else None


def _difference(step: Step, digest: str, *, flawed: bool) -> str | None:
    """What is wrong with the context of a step that is sound by itself; `flawed`: the step before it is not."""
    if step.context:
        return None if digest == step.context else "context_differs"
    return "context_flawed" if flawed else None
