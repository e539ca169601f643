"""The account of an audit: what was sampled, what of it is exact, what was recomputed, and every step that does not hold."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from penstock.records import Attempt, Group, Step
from penstock.train.exactness import Graph, breaks, read_graph, sampled_tokens, why_untrainable
from penstock.train.probes import Token

Status = Literal["exact", "inexact", "unproven"]
"""Unproven: nothing speaks against it, but no token could be recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A token under the weights that sampled it, then and now."""

    rollout_id: str
    step: int
    token: int
    version: int
    recorded: float
    recomputed: float

    @property
    def deviation(self) -> float:
        """Infinite where the weights give no number at all."""
        gap = abs(self.recorded - self.recomputed)
        return math.inf if math.isnan(gap) else gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A step that does not hold, and why."""

    rollout_id: str
    step: int
    reason: str
    tokens: int
    """How many of its tokens that concerns."""
    worst: Compared | None = None
    """The token that is furthest off, where log-probabilities were compared."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """What was found so far. Counts are named as in the metrics and the summary of a run."""

    run: str
    channel: str
    tolerance: float
    """How far a recomputed log-probability may be off."""
    groups: int = 0
    rollouts: int = 0
    steps: int = 0
    sampled_tokens: int = 0
    unhashed_tokens: int = 0
    inexact: Counter[str] = field(default_factory=Counter[str])
    masked: Counter[str] = field(default_factory=Counter[str])
    """Steps that no credit would make trainable, by reason."""
    breaks: Counter[str] = field(default_factory=Counter[str])
    recomputed: Counter[int] = field(default_factory=Counter[int])
    """Tokens by the version under which they were computed again."""
    gone: Counter[int] = field(default_factory=Counter[int])
    """Tokens by the version whose weights are not on disk any more."""
    largest: Compared | None = None
    total_deviation: float = 0.0
    findings: dict[tuple[str, int], Finding] = field(default_factory=dict[tuple[str, int], Finding])

    @property
    def exact_tokens(self) -> int:
        """Sampled tokens against which nothing was found."""
        return self.sampled_tokens - self.inexact.total()

    @property
    def exact_token_rate(self) -> float | None:
        """Share of the exact ones; None where nothing was sampled."""
        return self.exact_tokens / self.sampled_tokens if self.sampled_tokens else None

    @property
    def recomputed_tokens(self) -> int:
        """Under all versions that are on disk."""
        return self.recomputed.total()

    @property
    def gone_tokens(self) -> int:
        """Of all versions that are not."""
        return self.gone.total()

    @property
    def mean_deviation(self) -> float | None:
        """Over recomputed tokens."""
        return self.total_deviation / self.recomputed_tokens if self.recomputed else None

    @property
    def status(self) -> Status:
        """Tokens whose weights are gone count for nothing, as long as others were recomputed."""
        if self.findings:
            return "inexact"
        return "exact" if self.recomputed else "unproven"

    def add(self, group: Group) -> list[tuple[Attempt, Graph]]:
        """Check the records of a group; returns its attempts with their graphs, ready to be probed."""
        self.groups += 1
        read = [(attempt, read_graph(attempt)) for attempt in group.attempts]
        for attempt, graph in read:
            self.rollouts += 1
            self.breaks += breaks(attempt)
            for step in graph.steps.values():
                self._add_step(attempt, step, graph)
        return read

    def compare(self, token: Token, recomputed: float) -> None:
        """Take in what a token's log-probability is now."""
        found = Compared(
            rollout_id=token.rollout_id,
            step=token.step,
            token=token.place,
            version=token.version,
            recorded=token.logprob,
            recomputed=recomputed,
        )
        self.recomputed[token.version] += 1
        self.total_deviation += found.deviation
        if self.largest is None or found.deviation > self.largest.deviation:
            self.largest = found
        if found.deviation > self.tolerance:
            self.inexact["logprob_differs"] += 1
            self._find(token, "logprob_differs", found)

    def refuse(self, token: Token, reason: str) -> None:
        """Count a token that the weights of its version could not have sampled."""
        self.inexact[reason] += 1
        self._find(token, reason)

    def _add_step(self, attempt: Attempt, step: Step, graph: Graph) -> None:
        size = sampled_tokens(step)
        self.steps += 1
        self.sampled_tokens += size
        if reason := why_untrainable(step, graph):
            self.masked[reason] += 1
        if flaw := graph.flaws.get(step.index):
            self.inexact += Counter({flaw: size})  # which leaves a count of 0 out
            rollout_id = attempt.rollout.id
            self.findings[rollout_id, step.index] = Finding(rollout_id=rollout_id, step=step.index, reason=flaw, tokens=size)
        elif not step.context:
            self.unhashed_tokens += size

    def _find(self, token: Token, reason: str, found: Compared | None = None) -> None:
        key = token.rollout_id, token.step
        known = self.findings.get(key)
        worst = max((one for one in (found, known and known.worst) if one), key=lambda one: one.deviation, default=None)
        count = 1 if known is None else known.tokens + 1
        self.findings[key] = Finding(rollout_id=token.rollout_id, step=token.step, reason=reason, tokens=count, worst=worst)
