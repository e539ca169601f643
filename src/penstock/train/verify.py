"""`penstock verify`: recompute recorded tokens under the policy version that sampled them, and compare log-probabilities.

`verify` pages through a run. An `Audit` checks the records of each group. Then, for each version whose weights are on disk,
`make_probes` turns its tokens into sequences, which are packed and forwarded as in training. Checkpoints are compared with their
checksums first; a damaged one is a finding, and its weights are not used. Nothing is written."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, count
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from penstock.engines.embedded.decoder import Decoder, sees_pictures
from penstock.engines.embedded.lora import load_policy
from penstock.errors import ModelError, PoolError
from penstock.pool.rows import PictureStore
from penstock.records import Group, Node, Rollout, Sequence, Step
from penstock.run.folder import RunFolder
from penstock.run.recorded_run import RecordedRun
from penstock.train import checkpoints
from penstock.train.batches import CPU_TOKENS_PER_PASS, pack
from penstock.train.credit import group_of
from penstock.train.forward import pass_logprobs, trunk_states
from penstock.train.precision import round_as_served
from penstock.train.resources import AllowedReplay
from penstock.train.sequences import Graph, ReplayedStep, breaks, chosen_from, read_graph, sampled_tokens, why_untrainable


class ProbedToken(NamedTuple):
    """One sampled token, with the recorded log-probability that a forward pass must reproduce."""

    rollout_id: str
    step: int
    place: int
    """Index in the reply, from 0."""
    version: int
    logprob: float


class ProbedSequence(NamedTuple):
    """A sequence whose trained tokens are recomputed. No loss is computed from it."""

    sequence: Sequence
    tokens: list[ProbedToken]
    """One for each trained token, in order."""


class Probes(NamedTuple):
    """The tokens to recompute under one version, in the sequences that contain them."""

    sequences: list[ProbedSequence]
    problems: list[tuple[ProbedToken, str]]
    """Tokens that cannot be recomputed, as it is not known what they were chosen from, and why."""


def count_versions(read: Iterable[tuple[Rollout, Graph]]) -> Counter[int]:
    """Counts the tokens that each version sampled, in steps without a flaw."""
    counted: Counter[int] = Counter()
    for _, graph in read:
        for step in graph.steps.values():
            if step.index not in graph.flaws and step.index not in graph.pictured and not step.replayed:
                counted.update(step.versions)
    return counted


def unknown_grammar(step: Step) -> ReplayedStep:
    return ReplayedStep(problem="grammar_unknown")


def make_probes(
    read: Iterable[tuple[Rollout, Graph]], version: int, replay: Callable[[Step], ReplayedStep] = unknown_grammar
) -> Probes:
    """Returns one sequence per path with tokens of `version`. A token on several paths is probed on the first only."""
    probes = Probes([], [])
    for attempt, graph in read:
        sampled = {i: step for i, step in graph.steps.items() if not step.replayed}  # others are probed in the rollout they repeat
        left = {i for i, step in sampled.items() if version in step.versions and i not in graph.flaws and i not in graph.pictured}
        allowed = {i: chosen_from(graph.steps[i], replay) for i in left if graph.steps[i].limited}
        for index, found in allowed.items():
            if found.problem:
                left.remove(index)
                probed = zip(graph.steps[index].versions, graph.steps[index].logprobs, strict=True)
                tokens = [ProbedToken(attempt.ref.id, index, at, of, value) for at, (of, value) in enumerate(probed)]
                probes.problems.extend((token, found.problem) for token in tokens if token.version == version)
        for path in graph.paths:
            if mine := left.intersection(path):
                left -= mine
                probes.sequences.append(_probe(attempt, graph, path, mine, version, allowed))
    return probes


def _probe(
    rollout: Rollout, graph: Graph, path: list[int], mine: set[int], version: int, allowed: Mapping[int, ReplayedStep]
) -> ProbedSequence:
    ids, temperatures, wanted = list[int](), list[float](), list[bool]()
    limits, tokens = list[bytes](), list[ProbedToken]()
    for index in path[: max(path.index(index) for index in mine) + 1]:
        step = graph.steps[index]
        glue, size = graph.nodes[step.node].token_ids, len(step.completion_ids)
        logprobs, temperature = _recomputable(step)
        own = [each == version for each in step.versions] if index in mine else [False] * size
        ids += glue + step.completion_ids
        temperatures += [1.0] * len(glue) + [temperature] * size
        wanted += [False] * len(glue) + own
        limits += [b""] * len(glue)
        limits += allowed[index].allowed if index in mine and index in allowed else [b""] * size
        tokens += [ProbedToken(rollout.ref.id, index, at, version, logprobs[at]) for at, probed in enumerate(own) if probed]
    sequence = Sequence(
        rollout_id=rollout.ref.id,
        group_id=rollout.ref.group_id,
        token_ids=tuple(ids),
        trained=tuple(wanted),
        logprobs=(0.0,) * len(ids),
        temperatures=tuple(temperatures),
        advantages=(0.0,) * len(ids),
        weight=1.0,
        allowed=tuple(limits) if any(limits) else (),
    )
    return ProbedSequence(sequence, tokens)


def _recomputable(step: Step) -> tuple[tuple[float, ...], float]:
    """Returns the recorded log-probabilities that a forward pass can reproduce, and the temperature to compute them at.

    A greedy token has probability 1, truncated sampling renormalises over tokens that an engine may not tell, and some engines
    tell no more. For these, compare the full softmax at temperature 1.
    """
    if step.behaviour_known and step.sampling.temperature > 0 and (step.kept or not step.sampling.truncated):
        return step.logprobs, step.sampling.temperature
    return step.logprobs if step.full_logprobs is None else step.full_logprobs, 1.0


Status = Literal["exact", "inexact", "unproven"]
"""Unproven: there is no finding, but no token could be recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDeviation:
    """A token's log-probability under the weights that sampled it: recorded and recomputed."""

    rollout_id: str
    step: int
    token: int
    version: int
    recorded: float
    recomputed: float

    @property
    def deviation(self) -> float:
        """Infinite if the gap is NaN, so that no tolerance accepts it."""
        gap = abs(self.recorded - self.recomputed)
        return math.inf if math.isnan(gap) else gap


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinding:
    """A step whose record is wrong, and why."""

    rollout_id: str
    step: int
    reason: str
    tokens: int
    """The number of its tokens that are affected."""
    worst: TokenDeviation | None = None
    """The token with the largest deviation; None if no log-probabilities were compared."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """The result so far. Counts have the same names as in the metrics and summary of a run."""

    run: str
    channel: str
    tolerance: float
    """The largest accepted deviation of a recomputed log-probability."""
    groups: int = 0
    rollouts: int = 0
    steps: int = 0
    sampled_tokens: int = 0
    unhashed_tokens: int = 0
    inexact: Counter[str] = field(default_factory=Counter[str])
    masked: Counter[str] = field(default_factory=Counter[str])
    """Counts steps that cannot be trained at any advantage, by reason."""
    breaks: Counter[str] = field(default_factory=Counter[str])
    recomputed: Counter[int] = field(default_factory=Counter[int])
    """Recomputed tokens by version."""
    gone: Counter[int] = field(default_factory=Counter[int])
    """Tokens by version, for versions whose weights are not on disk, or tokens whose grammar cannot be replayed here."""
    largest: TokenDeviation | None = None
    total_deviation: float = 0.0
    checkpoints: int = 0
    """Checkpoints on disk, all compared with their checksums."""
    pictured_tokens: int = 0
    """Tokens sampled after a picture. Their contexts are checked, pictures included, and they are not recomputed."""
    sees_pictures: bool = False
    """Whether the start policy is a model of pictures, under which nothing can be recomputed here."""
    damaged: dict[str, str] = field(default_factory=dict[str, str])
    """What is wrong with a damaged checkpoint, by its name."""
    without_checksums: list[str] = field(default_factory=list[str])
    """Checkpoints without checksums, of an older penstock: only the sizes of their files were compared."""
    findings: dict[tuple[str, int], StepFinding] = field(default_factory=dict[tuple[str, int], StepFinding])

    @property
    def exact_tokens(self) -> int:
        """Sampled tokens without a finding."""
        return self.sampled_tokens - self.inexact.total()

    @property
    def exact_token_rate(self) -> float | None:
        """None if nothing was sampled."""
        return self.exact_tokens / self.sampled_tokens if self.sampled_tokens else None

    @property
    def recomputed_tokens(self) -> int:
        return self.recomputed.total()

    @property
    def gone_tokens(self) -> int:
        return self.gone.total()

    @property
    def mean_deviation(self) -> float | None:
        return self.total_deviation / self.recomputed_tokens if self.recomputed else None

    @property
    def status(self) -> Status:
        """Ignores tokens whose weights are gone, if others were recomputed."""
        if self.findings:
            return "inexact"
        return "exact" if self.recomputed else "unproven"

    def add(self, group: Group) -> list[tuple[Rollout, Graph]]:
        """Checks the records of a group; returns its attempts and their graphs, for `make_probes`."""
        self.groups += 1
        read = [(attempt, read_graph(attempt)) for attempt in group.rollouts]
        for attempt, graph in read:
            self.rollouts += 1
            self.breaks += breaks(attempt)
            for step in graph.steps.values():
                self._add_step(attempt, step, graph)
        return read

    def compare(self, token: ProbedToken, recomputed: float) -> None:
        """Records a token's recomputed log-probability."""
        result = TokenDeviation(
            rollout_id=token.rollout_id,
            step=token.step,
            token=token.place,
            version=token.version,
            recorded=token.logprob,
            recomputed=recomputed,
        )
        self.recomputed[token.version] += 1
        self.total_deviation += result.deviation
        if self.largest is None or result.deviation > self.largest.deviation:
            self.largest = result
        if result.deviation > self.tolerance:
            self.inexact["logprob_differs"] += 1
            self._find(token, "logprob_differs", result)

    def refuse(self, token: ProbedToken, reason: str) -> None:
        """Records a token that the weights of its version could not have sampled."""
        self.inexact[reason] += 1
        self._find(token, reason)

    def _add_step(self, attempt: Rollout, step: Step, graph: Graph) -> None:
        size = sampled_tokens(step)
        self.steps += 1
        self.sampled_tokens += size
        if reason := why_untrainable(step, graph):
            self.masked[reason] += 1
        if flaw := graph.flaws.get(step.index):
            self.inexact += Counter({flaw: size})  # += drops counts of 0
            rollout_id = attempt.ref.id
            self.findings[rollout_id, step.index] = StepFinding(rollout_id=rollout_id, step=step.index, reason=flaw, tokens=size)
        elif not step.context_digest:
            self.unhashed_tokens += size
        if step.index in graph.pictured:
            self.pictured_tokens += size

    def add_picture_problem(self, attempt: Rollout, graph: Graph, node: Node, reason: str) -> None:
        """Records that what the steps after a node saw cannot be shown any more."""
        for index in graph.descendants(node.id):
            step, rollout_id = graph.steps[index], attempt.ref.id
            size = sampled_tokens(step)
            if (rollout_id, index) not in self.findings:
                self.inexact += Counter({reason: size})
                self.findings[rollout_id, index] = StepFinding(rollout_id=rollout_id, step=index, reason=reason, tokens=size)

    def _find(self, token: ProbedToken, reason: str, result: TokenDeviation | None = None) -> None:
        key = token.rollout_id, token.step
        known = self.findings.get(key)
        worst = max((one for one in (result, known and known.worst) if one), key=lambda one: one.deviation, default=None)
        count = 1 if known is None else known.tokens + 1
        self.findings[key] = StepFinding(rollout_id=token.rollout_id, step=token.step, reason=reason, tokens=count, worst=worst)


class VersionWeights:
    """Loads policy versions from disk, one at a time. The start policy is version 0; the others are checkpoints."""

    def __init__(
        self,
        start: Path | None,
        checkpoints: Path,
        damaged: Collection[str] = (),
        *,
        rounded_by: int | None = None,
        base_dtype: torch.dtype | None = None,
        policy: str = "",
        frozen: bool = False,
    ) -> None:
        """`rounded_by`: the seed by which the start policy was rounded before it was served; None if it was not.

        `base_dtype`: the precision in which the base of adapters was served; None if whole models were trained.
        `policy`: one of several; a `frozen` one is the start policy in every version.
        """
        self._policy, self._frozen = policy, frozen
        self._start, self._checkpoints, self._damaged, self._rounded_by = start, checkpoints, damaged, rounded_by
        self._base_dtype = base_dtype
        self._version: int | None = None
        self._decoder: Decoder | None = None
        self._replay: AllowedReplay | None = None

    def load(self, version: int) -> Decoder | None:
        """Returns the decoder of `version` in float32 on the CPU, or None if its weights are not on disk."""
        version = 0 if self._frozen else version
        if version != self._version:
            self._version, self._decoder = None, None  # free its memory before the next is loaded
            self._decoder = self._read(version)
            self._version = version
        return self._decoder

    def replay(self, decoder: Decoder) -> Callable[[Step], ReplayedStep]:
        """Finds what tokens were chosen from; for nothing if the start policy is not on this machine."""
        if self._start is None:
            return unknown_grammar
        if self._replay is None:
            self._replay = AllowedReplay(self._start, decoder.shape.vocab_size)
        return self._replay

    def _read(self, version: int) -> Decoder | None:
        folder = self._find(version)
        if folder is None:
            return None
        try:
            decoder = load_policy(folder).requires_grad_(False)
            if self._base_dtype is not None:
                decoder.to(self._base_dtype).float()
            elif version == 0 and self._rounded_by is not None:
                round_as_served(dict(decoder.named_parameters()), seed=self._rounded_by)
            return decoder
        except ModelError:
            if self._find(version) is None:  # a running trainer removed the checkpoint meanwhile
                return None
            raise

    def _find(self, version: int) -> Path | None:
        if version == 0 or self._frozen:
            return self._start
        folder = checkpoints.find(self._checkpoints, version)
        return None if folder is None or folder.name in self._damaged else folder / self._policy


def recompute(decoder: Decoder, probes: Probes, audit: Audit, *, tokens_per_pass: int) -> Iterator[int]:
    """Compares each probed token in `audit`; yields the number of tokens in each pass."""
    probed = _computable(decoder, probes, audit)
    batch = pack((each.sequence for each in probed), rollouts=1, tokens_per_pass=tokens_per_pass)
    numbers = compress(count(), chain.from_iterable(each.sequence.trained for each in probed))
    tokens = dict(zip(numbers, chain.from_iterable(each.tokens for each in probed), strict=False))  # by `LossTerm.token`
    for pass_set in batch.pass_sets:
        trunk = trunk_states(decoder, pass_set.trunk)
        for one in pass_set.passes:
            logprobs: list[float] = pass_logprobs(decoder, one, trunk, flat=batch.flat).tolist()  # pyright: ignore[reportUnknownVariableType]
            for term, logprob in zip(one.terms, logprobs, strict=True):
                audit.compare(tokens[term.token], logprob)
            yield len(logprobs)


def _computable(decoder: Decoder, probes: Probes, audit: Audit) -> list[ProbedSequence]:
    """Returns the sequences that fit the decoder; refuses the tokens of the others."""
    shape, possible = decoder.shape, list[ProbedSequence]()
    for probed in probes.sequences:
        sequence = probed.sequence
        reason = "bad_token" if max(sequence.token_ids) >= shape.vocab_size else None
        if len(sequence.token_ids) - 1 > shape.context_length:
            reason = "context_too_long"
        if reason is None:
            possible.append(probed)
        else:
            for token in probed.tokens:
                audit.refuse(token, reason)
    return possible


TOLERANCES = {"float32": 1e-3, "bfloat16": 2.0}
"""Default tolerance by the dtype of the engine. The audit itself computes in float32.

Measured on 135 million parameters: float32 deviates by at most 2e-4, bfloat16 by 4e-2 on average and 1.5 on the rarest tokens.
"""

OnProgress = Callable[[int, int], None]
"""Takes the number of groups checked so far, and the total."""


async def verify(recorded: RecordedRun, on_progress: OnProgress, *, tolerance: float | None = None) -> Audit:
    """Audits every token of the run. If `tolerance` is None, the engine's dtype decides it."""
    precision, start, pictures = _precision(recorded), recorded.start_policy, PictureStore(recorded.folder.path)
    limit = TOLERANCES[precision] if tolerance is None else tolerance
    audit = Audit(run=recorded.config.run.name, channel=recorded.channel, tolerance=limit)
    await asyncio.to_thread(check_checkpoints, recorded.folder, audit)
    if start is not None and sees_pictures(start):
        audit.sees_pictures, start = True, None
    seed = recorded.config.run.seed if precision == "bfloat16" else None
    dtype = getattr(torch, precision) if recorded.config.train.method == "lora" else None
    open_weights = partial(VersionWeights, rounded_by=seed, base_dtype=dtype)
    weights = {
        name: open_weights(recorded.start_weights(name), recorded.folder.checkpoints, audit.damaged, policy=name, frozen=one.frozen)
        for name, one in recorded.config.policies.items()
    } or {"": open_weights(start, recorded.folder.checkpoints, audit.damaged)}
    total = recorded.last_seq + 1 - recorded.first_seq
    chosen = recorded.config.train.tokens_per_pass
    on_progress(0, total)
    async for groups in recorded.pages():
        await _check(groups, audit, weights, pictures, tokens_per_pass=CPU_TOKENS_PER_PASS if chosen == "auto" else chosen)
        on_progress(audit.groups, total)
    return audit


def check_checkpoints(run: RunFolder, audit: Audit) -> None:
    """Compares all checkpoints with their checksums."""
    for folder, problem in checkpoints.check_all(run.checkpoints, run.id).items():
        if not folder.exists():  # a running trainer removed it meanwhile
            continue
        audit.checkpoints += 1
        if problem is not None:
            audit.damaged[folder.name] = problem
        elif not checkpoints.has_checksums(folder):
            audit.without_checksums.append(folder.name)


def check_pictures(read: Iterable[tuple[Rollout, Graph]], pictures: PictureStore, audit: Audit) -> None:
    """Reads every picture that was seen, and compares it with its digest."""
    for attempt, graph in read:
        for node in graph.nodes.values():
            for picture in node.pictures:
                try:
                    pictures.read(picture.digest)
                except PoolError:
                    reason = "picture_damaged" if pictures.path(picture.digest).exists() else "picture_missing"
                    audit.add_picture_problem(attempt, graph, node, reason)


async def _check(
    groups: list[Group], audit: Audit, weights: dict[str, VersionWeights], pictures: PictureStore, *, tokens_per_pass: int
) -> None:
    read: list[tuple[Rollout, Graph]] = [one for group in groups for one in audit.add(group)]
    await asyncio.to_thread(check_pictures, read, pictures, audit)
    for name, of_policy in weights.items():
        own = [(attempt, read_graph(attempt)) for group in groups for attempt in group_of(group, name).rollouts] if name else read
        await _recompute(own, audit, of_policy, tokens_per_pass=tokens_per_pass)


async def _recompute(read: list[tuple[Rollout, Graph]], audit: Audit, weights: VersionWeights, *, tokens_per_pass: int) -> None:
    for version, size in sorted(count_versions(read).items()):
        decoder = await asyncio.to_thread(weights.load, version)
        if decoder is None:
            audit.gone[version] += size
            continue
        probes = await asyncio.to_thread(make_probes, read, version, weights.replay(decoder))
        for token, reason in probes.problems:
            if reason == "not_allowed":
                audit.refuse(token, reason)
            else:
                audit.gone[version] += 1
        passes = recompute(decoder, probes, audit, tokens_per_pass=tokens_per_pass)
        while await asyncio.to_thread(next, passes, None) is not None:  # one thread call per pass, so Ctrl-C waits for one pass
            pass


def _precision(recorded: RecordedRun) -> str:
    """Returns the dtype of the engine: the configured one or, if `auto`, that of the checkpoints."""
    chosen = recorded.config.engine.dtype
    if chosen == "auto":
        chosen = "bfloat16" if checkpoints.is_half_precision(recorded.folder.checkpoints) else "float32"
    return chosen
