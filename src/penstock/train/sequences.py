"""Builds training sequences from the token graphs of a group's rollouts, and checks that they are exact.

The gateway records, with each step, a digest of the ids that the engine saw and sampled. This module computes the same digest
from the ids in the token graph, which training uses. A step whose digests differ is never trained.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from penstock.codec import extend_ids_hash
from penstock.engines.token_sets import in_set
from penstock.errors import TrainError
from penstock.records import BEHAVIOUR_UNKNOWN, Group, Node, Rollout, Sequence, Step
from penstock.train.advantages.base import Credit, credit_by_step

PICTURE_IN_CONTEXT = "picture_in_context"
"""Why a step is masked that was sampled after a picture."""
LARGEST_ID = 2**31 - 1
"""Ids are stored and hashed as int32."""


class Exactness(NamedTuple):
    """Counts sampled tokens. An exact token is trained under the same context that it was sampled under."""

    exact_tokens: int
    sampled_tokens: int
    inexact: Counter[str]
    """The tokens that are not exact, by reason."""
    unhashed_tokens: int
    """Exact tokens recorded without a digest: their records are consistent, but that proves nothing."""

    @property
    def rate(self) -> float | None:
        """None if nothing was sampled."""
        return self.exact_tokens / self.sampled_tokens if self.sampled_tokens else None


class Graph(NamedTuple):
    """The token graph of one rollout: nodes by id, steps by index."""

    nodes: dict[int, Node]
    steps: dict[int, Step]
    """Sorted by index, so a step comes after those it continues."""
    parents: dict[int, int | None]
    """Step → the step that it continues, None at a root. Lacks steps whose context is missing or whose ids are impossible."""
    flaws: dict[int, str]
    """Step → why its tokens cannot be trained."""
    pictured: set[int]
    """Steps that were sampled after a picture, which a learner of text cannot see."""

    @property
    def paths(self) -> list[list[int]]:
        """The steps from the root to each leaf, one list per leaf, in the order of the leaves."""
        inner = set(self.parents.values())
        return [self._path(leaf) for leaf in self.parents if leaf not in inner]

    def descendants(self, node: int) -> list[int]:
        """The steps whose context holds the tokens of a node."""
        found = dict[int | None, None]()
        for index, parent in self.parents.items():  # a step comes after those it continues
            if self.steps[index].node == node or parent in found:
                found[index] = None
        return [index for index in found if index is not None]

    def _path(self, leaf: int) -> list[int]:
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = self.parents[at]
        return path[::-1]


def exactness(*attempts: Rollout) -> Exactness:
    """Checks every step's record: columns are aligned, numbers are possible, and the context matches its digest."""
    sampled, unhashed = 0, 0
    inexact: Counter[str] = Counter()
    for attempt in attempts:
        flaws = read_graph(attempt).flaws
        for step in attempt.steps:
            size = sampled_tokens(step)
            sampled += size
            if reason := flaws.get(step.index):
                inexact += Counter({reason: size})  # += drops counts of 0
            elif not step.context_digest:
                unhashed += size
    return Exactness(sampled - inexact.total(), sampled, inexact, unhashed)


def sampled_tokens(step: Step) -> int:
    """Returns the length of the longest column, as a flawed record may have lost tokens in the others."""
    return max(len(step.completion_ids), len(step.logprobs), len(step.versions))


def behaviour_unknown_tokens(*attempts: Rollout) -> int:
    """Counts the sampled tokens whose engine did not tell the probabilities that it sampled with."""
    return sum(len(step.completion_ids) for attempt in attempts for step in attempt.steps if not step.behaviour_known)


def breaks(*attempts: Rollout) -> Counter[str]:
    """Counts, by reason, how often messages were rendered from scratch although the rollout had earlier steps.

    Tokens sampled after a break are still exact: they are trained under the new rendering.
    """
    return Counter(node.reason for attempt in attempts for node in attempt.nodes if node.reason)


def read_graph(attempt: Rollout) -> Graph:
    """Returns the token graph with its flaws. Takes time linear in its tokens, however many paths share them."""
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in sorted(attempt.steps, key=lambda step: step.index)}
    graph, contexts = Graph(nodes, steps, {}, {}, set()), _ContextHashes()
    for index, step in steps.items():
        node = nodes.get(step.node)
        if node is None or not (node.parent is None or node.parent in graph.parents):
            graph.flaws[index] = "context_missing"
        elif not _are_ids((*node.token_ids, *step.completion_ids)):
            graph.flaws[index] = "bad_token"
        else:
            graph.parents[index] = node.parent
            if node.pictures or node.parent in graph.pictured:
                graph.pictured.add(index)
            digest = contexts.add(step, node)
            if reason := _flaw(step, node) or _difference(step, digest, flawed=node.parent in graph.flaws):
                graph.flaws[index] = reason
    return graph


def why_untrainable(step: Step, graph: Graph) -> str | None:
    """Returns why a step's tokens cannot be trained at any advantage, or None if they can."""
    if reason := graph.flaws.get(step.index):
        return reason
    if step.replayed:
        return "replayed"
    if step.index in graph.pictured:
        return PICTURE_IN_CONTEXT
    if not step.completion_ids:
        return "empty" if step.usage is None else "relayed"
    if step.finish in ("cancelled", "error"):
        return step.finish
    return "greedy" if step.sampling.temperature == 0 else None


class _ContextHashes:
    """Computes digests of the paths through a graph, each by extending its parent's."""

    def __init__(self) -> None:
        self._prompts: dict[int, blake2b] = {}
        self._replies: dict[int, blake2b] = {}

    def add(self, step: Step, node: Node) -> str:
        """Returns the digest of the path up to the end of this step's reply."""
        if node.id not in self._prompts:
            before = None if node.parent is None else self._replies[node.parent]
            self._prompts[node.id] = extend_ids_hash(before, node.token_ids)
        self._replies[step.index] = extend_ids_hash(self._prompts[node.id], step.completion_ids)
        return self._replies[step.index].hexdigest()


def _are_ids(numbers: tuple[int, ...]) -> bool:
    return min(numbers, default=0) >= 0 and max(numbers, default=0) <= LARGEST_ID


def _flaw(step: Step, node: Node) -> str | None:
    """Returns what is impossible in the record of one step alone. A reply relayed from an endpoint has no tokens to check."""
    if step.usage is not None and not step.completion_ids:
        return None
    full = step.logprobs if step.full_logprobs is None else step.full_logprobs
    columns = (step.logprobs, step.versions, full, step.kept or step.versions)
    if any(len(column) != len(step.completion_ids) for column in columns):
        return "misaligned"
    if not all(math.isfinite(value) and value <= 1e-3 for value in step.logprobs):  # rounding may put a logprob just above 0
        return "bad_logprob"
    if min(step.versions, default=0) < 0:
        return "bad_version"
    return "context_missing" if node.parent is None and not node.token_ids else None


def _difference(step: Step, digest: str, *, flawed: bool) -> str | None:
    """Returns what is wrong with the context of a step; `flawed`: its parent has a flaw."""
    if step.context_digest:
        return None if digest == step.context_digest else "context_differs"
    return "context_flawed" if flawed else None


class ReplayedStep(NamedTuple):
    """What the tokens of a step were chosen from."""

    allowed: tuple[bytes, ...] = ()
    """Per token: see `Sequence.allowed`."""
    problem: str | None = None
    """Why that is not known."""


def chosen_from(step: Step, replay: Callable[[Step], ReplayedStep]) -> ReplayedStep:
    """Returns what the tokens of a limited step were chosen from: as recorded, else replayed from its grammar."""
    if not step.kept:
        return replay(step)
    possible = all(in_set(token_id, kept) for token_id, kept in zip(step.completion_ids, step.kept, strict=True))
    return ReplayedStep(step.kept) if possible else ReplayedStep(problem="not_allowed")


def no_replay(step: Step) -> ReplayedStep:
    return ReplayedStep(problem="constrained")


class SequencesResult(NamedTuple):
    """The sequences of a group, with counts of what was used and what was left out."""

    sequences: list[Sequence]
    counts: Counter[str]
    """`rollouts` in the mean of the loss, trained `tokens`, `groups_equal` (all advantages are 0), `groups_ungraded`,
    rollouts that are `ungraded` or `curated` out, `recomputed_tokens` (see `sequences`), and steps `masked.<reason>`. Counters of
    several groups can be added."""


def sequences(
    group: Group,
    advantages: Iterable[Credit],
    *,
    divisor: float | None = None,
    without_credit: bool = False,
    recompute: bool = False,
    replay: Callable[[Step], ReplayedStep] | None = None,
) -> SequencesResult:
    """Returns one sequence per path with trained tokens, of each graded rollout's graph, cut after the last of them.

    `advantages` are those of `group.graded`. A reply on several paths is trained on the first and is context on the others.
    All tokens of a rollout have the same weight: 1 / `divisor` or, without one, 1 / (its tokens that can be trained), so that
    every rollout counts the same. If all advantages are 0, the group adds no sequences and no rollouts to the mean of the loss,
    unless `without_credit`, which keeps tokens whose credit is 0, as they get another one later.

    A step whose engine did not report with which probability it sampled is masked or, with `recompute`, trained with
    the learner's own log-probabilities in place of the engine's. A step whose tokens were not chosen from all is masked, unless
    `replay` knows what they were chosen from.
    """
    credit = list(advantages)
    if len(credit) != len(group.graded):
        raise TrainError(f"group {group.id} has {len(group.graded)} graded rollouts but was given {len(credit)} advantages")
    by_step = [_checked_credit(group, attempt, each) for attempt, each in zip(group.graded, credit, strict=True)]
    out = sum(attempt.curated_out for attempt in group.rollouts)
    counts = Counter({"ungraded": len(group.rollouts) - len(credit) - out, "curated": out})
    taught = without_credit or any(value for each in by_step for value in each.values()) or _any_number(credit)
    if not credit or not taught:
        counts["groups_equal" if credit else "groups_ungraded"] += 1
        return SequencesResult([], counts)
    counts["rollouts"] = len(credit)
    made: list[Sequence] = []
    for attempt, each in zip(group.graded, by_step, strict=True):
        reasons = step_masks(attempt, graph := read_graph(attempt), each, without_credit=without_credit, recompute=recompute)
        allowed = _replayed(graph, reasons, replay)
        part = _of_attempt(attempt, graph, reasons, each, divisor, allowed)
        made += part.sequences
        counts += part.counts
    return SequencesResult(made, counts)


def _replayed(
    graph: Graph, reasons: dict[int, str | None], replay: Callable[[Step], ReplayedStep] | None
) -> dict[int, tuple[bytes, ...]]:
    """Returns what the tokens of each step were chosen from, where not from all; where that is not known, `reasons` gets why."""
    allowed: dict[int, tuple[bytes, ...]] = {}
    for index, step in graph.steps.items():
        if reasons[index] is None and step.limited:
            found = chosen_from(step, replay or no_replay)
            allowed[index], reasons[index] = found.allowed, found.problem
    return allowed


def _any_number(credit: list[Credit]) -> bool:
    """Whether a rollout as a whole has credit: it counts in the mean of the loss even if it has no step."""
    return any(each for each in credit if isinstance(each, int | float))


def _checked_credit(group: Group, attempt: Rollout, credit: Credit) -> dict[int, float]:
    by_step = credit_by_step(attempt, credit)
    numbers = [*by_step.values(), *([credit] if isinstance(credit, int | float) else [])]
    if not all(math.isfinite(value) for value in numbers):
        raise TrainError(f"group {group.id} was given the advantages {credit}; each must be finite")
    return by_step


def _of_attempt(
    attempt: Rollout,
    graph: Graph,
    reasons: Mapping[int, str | None],
    advantages: Mapping[int, float],
    divisor: float | None,
    allowed: Mapping[int, tuple[bytes, ...]],
) -> SequencesResult:
    """Returns the sequences of one rollout; `reasons` are its `step_masks`."""
    qualities = _qualities(attempt)
    counts = Counter(f"masked.{reason}" for reason in reasons.values() if reason)
    left = {index for index, reason in reasons.items() if reason is None}
    counts["tokens"] = sum(len(graph.steps[index].completion_ids) for index in left)
    unknown = [graph.steps[index] for index in left if not graph.steps[index].behaviour_known]
    counts += Counter({"recomputed_tokens": sum(len(step.completion_ids) for step in unknown)})
    # Steps without credit count too, or the rest of the rollout would weigh more for them.
    size = sum(len(graph.steps[index].completion_ids) for index, reason in reasons.items() if reason in (None, "zero_advantage"))
    weight = 1.0 / (divisor or size or 1)
    made: list[Sequence] = []
    for path in graph.paths:
        if mine := left.intersection(path):
            left -= mine
            credit = {index: advantages[index] * qualities[index] for index in mine}
            made.append(_sequence(attempt, graph, path, credit, weight=weight, allowed=allowed))
    return SequencesResult(made, counts)


def step_masks(
    attempt: Rollout, graph: Graph, credit: Credit, *, without_credit: bool = False, recompute: bool = False
) -> dict[int, str | None]:
    """Returns, for each step of a graded rollout, why its tokens are not trained; None if they are."""
    qualities, advantages = _qualities(attempt), credit_by_step(attempt, credit)
    return {
        index: _mask(step, 1.0 if without_credit else advantages[index], graph, qualities[index], recompute=recompute)
        for index, step in graph.steps.items()
    }


def _mask(step: Step, advantage: float, graph: Graph, quality: float, *, recompute: bool) -> str | None:
    """Returns why a step's tokens are not trained, or None if they are."""
    without_credit = "zero_advantage" if not advantage else None if quality else "curated"
    unknown = None if step.behaviour_known or recompute else BEHAVIOUR_UNKNOWN
    return why_untrainable(step, graph) or without_credit or unknown


def _qualities(attempt: Rollout) -> dict[int, float]:
    """Returns the factor of each step's advantage: 0 if a curator removed the step."""
    marks = {mark.step: mark for mark in attempt.marks}
    whole = marks[None].quality if None in marks else 1.0
    own = {mark.step: mark.quality if mark.trainable else 0.0 for mark in attempt.marks}
    return {step.index: whole * own.get(step.index, 1.0) for step in attempt.steps}


def _sequence(
    attempt: Rollout,
    graph: Graph,
    path: list[int],
    credit: dict[int, float],
    *,
    weight: float,
    allowed: Mapping[int, tuple[bytes, ...]],
) -> Sequence:
    """Returns the path up to its last step in `credit`, which maps steps to the advantage of their tokens."""
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
    temperatures, advantages, steps = [1.0] * len(ids), [0.0] * len(ids), [-1] * len(ids)
    unknown = [False] * len(ids) if not all(step.behaviour_known for _, step in credited) else []
    limits = [b""] * len(ids) if any(step.index in allowed for _, step in credited) else []
    for reply, step in credited:
        size = len(step.completion_ids)
        steps[reply] = [step.index] * size
        trained[reply], versions[reply] = [True] * size, step.versions
        if step.behaviour_known:
            logprobs[reply] = step.logprobs
        else:
            unknown[reply] = [True] * size
        temperatures[reply], advantages[reply] = [step.sampling.temperature] * size, [credit[step.index]] * size
        if step.index in allowed:
            limits[reply] = allowed[step.index]
    return Sequence(
        rollout_id=attempt.ref.id,
        group_id=attempt.ref.group_id,
        token_ids=tuple(ids),
        trained=tuple(trained),
        logprobs=tuple(logprobs),
        temperatures=tuple(temperatures),
        advantages=tuple(advantages),
        weight=weight,
        versions=tuple(versions),
        steps=tuple(steps),
        recomputed=tuple(unknown),
        allowed=tuple(limits),
    )
