"""Which recorded tokens can be computed again under a policy version, and the sequences that do it."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.weights import load_decoder
from penstock.errors import ModelError
from penstock.records import Attempt, Group, Sequence, Step
from penstock.run.recorded_run import RecordedRun
from penstock.train import policy
from penstock.train.batches import pack
from penstock.train.forward import pass_logprobs, trunk_states
from penstock.train.sequences import Graph, breaks, read_graph, sampled_tokens, why_untrainable


class ProbedToken(NamedTuple):
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
    tokens: list[ProbedToken]


def count_versions(read: Iterable[tuple[Attempt, Graph]]) -> Counter[int]:
    """How many tokens each version sampled, in steps whose record has no flaw."""
    counted: Counter[int] = Counter()
    for _, graph in read:
        for step in graph.steps.values():
            if step.index not in graph.flaws:
                counted.update(step.versions)
    return counted


def make_probes(read: Iterable[tuple[Attempt, Graph]], version: int) -> Probes:
    """One sequence per path with tokens of `version`, each token on the first path that it is on."""
    probes = Probes([], [])
    for attempt, graph in read:
        left = {i for i, step in graph.steps.items() if version in step.versions and i not in graph.flaws}
        for path in graph.paths:
            if mine := left.intersection(path):
                left -= mine
                probes.sequences.append(_sequence(attempt, graph, path, mine, version, probes.tokens))
    return probes


def _sequence(attempt: Attempt, graph: Graph, path: list[int], mine: set[int], version: int, tokens: list[ProbedToken]) -> Sequence:
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
                tokens.append(ProbedToken(attempt.rollout.id, index, place, version, logprobs[place]))
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


Status = Literal["exact", "inexact", "unproven"]
"""Unproven: nothing speaks against it, but no token could be recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDeviation:
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
class StepFinding:
    """A step that does not hold, and why."""

    rollout_id: str
    step: int
    reason: str
    tokens: int
    """How many of its tokens that concerns."""
    worst: TokenDeviation | None = None
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
    largest: TokenDeviation | None = None
    total_deviation: float = 0.0
    findings: dict[tuple[str, int], StepFinding] = field(default_factory=dict[tuple[str, int], StepFinding])

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

    def compare(self, token: ProbedToken, recomputed: float) -> None:
        """Take in what a token's log-probability is now."""
        found = TokenDeviation(
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

    def refuse(self, token: ProbedToken, reason: str) -> None:
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
            self.findings[rollout_id, step.index] = StepFinding(rollout_id=rollout_id, step=step.index, reason=flaw, tokens=size)
        elif not step.context:
            self.unhashed_tokens += size

    def _find(self, token: ProbedToken, reason: str, found: TokenDeviation | None = None) -> None:
        key = token.rollout_id, token.step
        known = self.findings.get(key)
        worst = max((one for one in (found, known and known.worst) if one), key=lambda one: one.deviation, default=None)
        count = 1 if known is None else known.tokens + 1
        self.findings[key] = StepFinding(rollout_id=token.rollout_id, step=token.step, reason=reason, tokens=count, worst=worst)


class VersionWeights:
    """The policy versions that are on disk: the start policy is version 0, the others are checkpoints. Holds one at a time."""

    def __init__(self, start: Path | None, checkpoints: Path) -> None:
        self._start, self._checkpoints = start, checkpoints
        self._version: int | None = None
        self._decoder: Decoder | None = None

    def load(self, version: int) -> Decoder | None:
        """The decoder of `version` in float32, on the CPU; None where its weights are not here, or were removed just now."""
        if version != self._version:
            self._version, self._decoder = None, None  # the one before goes before the next one comes
            self._decoder = self._read(version)
            self._version = version
        return self._decoder

    def _read(self, version: int) -> Decoder | None:
        folder = self._find(version)
        if folder is None:
            return None
        try:
            return load_decoder(folder).requires_grad_(False)
        except ModelError:
            if self._find(version) is None:  # training went on and let go of this checkpoint meanwhile
                return None
            raise

    def _find(self, version: int) -> Path | None:
        return self._start if version == 0 else policy.find(self._checkpoints, version)


def recompute(decoder: Decoder, probes: Probes, audit: Audit, *, tokens_per_pass: int) -> Iterator[int]:
    """Tell `audit` what each probed token's log-probability is now; yields after each pass how many tokens that were."""
    batch = pack(_computable(decoder, probes, audit), rollouts=1, tokens_per_pass=tokens_per_pass)
    for bundle in batch.bundles:
        trunk = trunk_states(decoder, bundle.trunk)
        for one in bundle.passes:
            logprobs: list[float] = pass_logprobs(decoder, one, trunk, flat=batch.flat).tolist()  # pyright: ignore[reportUnknownVariableType]
            for term, logprob in zip(one.terms, logprobs, strict=True):
                audit.compare(probes.tokens[int(term.advantage)], logprob)
            yield len(logprobs)


def _computable(decoder: Decoder, probes: Probes, audit: Audit) -> list[Sequence]:
    """Those that the decoder can take; tokens of the others are refused."""
    shape, possible = decoder.shape, list[Sequence]()
    for sequence in probes.sequences:
        reason = "bad_token" if max(sequence.token_ids) >= shape.vocab_size else None
        if len(sequence.token_ids) - 1 > shape.context_length:
            reason = "context_too_long"
        if reason is None:
            possible.append(sequence)
            continue
        for number, wanted in zip(sequence.advantages, sequence.trained, strict=True):
            if wanted:
                audit.refuse(probes.tokens[int(number)], reason)
    return possible


TOLERANCES = {"float32": 1e-3, "bfloat16": 2.0}
"""How far a recomputed log-probability may be off, by what the engine computed in; the audit itself computes in float32.

Of a model with 135 million parameters, float32 is off by 2e-4 at most; bfloat16 by 4e-2 on average and 1.5 on the rarest tokens.
"""

OnProgress = Callable[[int, int], None]
"""Called with how many groups are done, and of how many."""


async def verify(recorded: RecordedRun, heard: OnProgress, *, tolerance: float | None = None) -> Audit:
    """Read the run from its first group to its last and account for every token. Nothing is written."""
    limit = TOLERANCES[_precision(recorded)] if tolerance is None else tolerance
    audit = Audit(run=recorded.config.run.name, channel=recorded.channel, tolerance=limit)
    weights = VersionWeights(recorded.start_policy, recorded.folder.checkpoints)
    total = recorded.last_seq + 1 - recorded.first_seq
    heard(0, total)
    async for groups in recorded.pages():
        await _check(groups, audit, weights, tokens_per_pass=recorded.config.train.tokens_per_pass)
        heard(audit.groups, total)
    return audit


async def _check(groups: list[Group], audit: Audit, weights: VersionWeights, *, tokens_per_pass: int) -> None:
    read: list[tuple[Attempt, Graph]] = [one for group in groups for one in audit.add(group)]
    for version, count in sorted(count_versions(read).items()):
        decoder = await asyncio.to_thread(weights.load, version)
        if decoder is None:
            audit.gone[version] += count
            continue
        passes = recompute(decoder, make_probes(read, version), audit, tokens_per_pass=tokens_per_pass)
        while await asyncio.to_thread(next, passes, None) is not None:  # one pass at a time, so that Ctrl-C does not wait long
            pass


def _precision(recorded: RecordedRun) -> str:
    """What the engine computed in: as the run says, else as its checkpoints were written."""
    chosen = recorded.config.engine.dtype
    if chosen == "auto":
        chosen = "bfloat16" if policy.is_half_precision(recorded.folder.checkpoints) else "float32"
    return chosen
