"""What a training step reports: its line in `metrics.jsonl`, and scores of each trained token in `scores/` of the run folder.

A file of scores holds one step. A line is one sequence: the log-probability of its trained tokens less the engine's, before the
step's first update, and their entropy, both as half-precision numbers in base64; and its advantages and steps as runs of
`[count, value]`. Training reads none of it.
"""

import asyncio
import base64
import logging
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import compress, groupby
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import orjson

from penstock.pool.base import Pool
from penstock.records import Group, Lease, Rollout, component_means
from penstock.records import Sequence as TrainingSequence
from penstock.run.folder import COMPONENT
from penstock.run.shortfalls import ScoredEnd, shortfalls, shortfalls_json
from penstock.system.files import write_file
from penstock.train.batches import Batch
from penstock.train.credit import CreditedSequences, group_of
from penstock.train.device import peak_memory
from penstock.train.learner import UpdateMetrics, UpdateResult, total_metrics
from penstock.train.monitoring import reply_examples
from penstock.train.publishing import Publication
from penstock.train.resources import TrainingRun, TrainProgress
from penstock.train.sequences import behaviour_unknown_tokens, breaks, exactness

MOST_TOKENS = 50_000
"""A step that trains more tokens keeps no scores: laying them out takes a second for every hundred thousand."""
HALF_MAX = 65504.0
log = logging.getLogger(__name__)


class LearnerUpdate(NamedTuple):
    """The first update of one policy in a step, computed but not applied."""

    batch: Batch
    result: UpdateResult


class ComputedUpdate(NamedTuple):
    """The first update of a step, computed but not applied, by policy."""

    credit: dict[str, CreditedSequences]
    parts: dict[str, LearnerUpdate]
    """Lacks policies without sequences."""


class ReadyStep(NamedTuple):
    """Groups that a step trains on, with their first update."""

    lease: Lease
    update: ComputedUpdate
    set_aside: int
    """Groups that were set aside on the way."""
    rollout_s: float
    """Spent on waiting for groups."""


def step_metrics(
    run: TrainingRun,
    ready: ReadyStep,
    metrics: dict[str, UpdateMetrics],
    progress: TrainProgress,
    *,
    version: int,
    train_s: float,
) -> dict[str, Any]:
    """Returns a line of `metrics.jsonl`, but for the speed of sampling.

    `version` was served before the update: staleness is measured against it.
    """
    lease, credit = ready.lease, ready.update.credit
    attempts = [attempt for group in lease.groups for attempt in group.rollouts]
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    exact = exactness(*attempts)
    total = total_credit(credit, lease.groups)
    return {
        "step": progress.step,
        "steps": run.config.train.steps,
        "version": progress.version,
        "reward": sum(rewards) / len(rewards),
        "rewards": rewards,
        **{f"{COMPONENT}{name}": mean for name, mean in component_means(attempts).items()},
        "groups": len(lease.groups),
        "group_ids": [group.id for group in lease.groups],
        "groups_equal": total.counts["groups_equal"],
        "groups_stale": lease.stale,
        "rollouts": len(attempts),
        "ends": dict(Counter(str(attempt.end) for attempt in attempts)),
        "shortfalls": shortfalls_json(shortfalls(map(_scored_end, attempts), run.config.eval.passes)),
        "masked": _masked(total),
        "breaks": dict(breaks(*attempts)),
        **branch_ends(lease.groups),
        "inexact": dict(exact.inexact),
        "exact_tokens": exact.exact_tokens,
        "sampled_tokens": exact.sampled_tokens,
        "unhashed_tokens": exact.unhashed_tokens,
        "behaviour_unknown_tokens": behaviour_unknown_tokens(*attempts),
        "recomputed_tokens": total.counts["recomputed_tokens"],
        "exact_token_rate": exact.rate,
        **asdict(total_metrics(list(metrics.values()))),
        "rollout_s": round(ready.rollout_s, 3),
        "train_s": round(train_s, 3),
        "peak_memory_mb": max((round(peak_memory(each.decoder.device) / 1e6, 1) for each in run.learners.values()), default=None),
        "groups_set_aside": ready.set_aside,
        "code_changes": max(0, len(run.folder.code_versions()) - 1),
        **reply_examples(attempts),
        **staleness(total.sequences, version),
        **_publication(run),
        **({"policies": policy_metrics(run, ready, metrics, version=version)} if run.config.policies else {}),
    }


def _scored_end(attempt: Rollout) -> ScoredEnd:
    return ScoredEnd(str(attempt.end), attempt.message, attempt.reward)


def branch_ends(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns how the branches ended, as `metrics.jsonl` has it; nothing without branches."""
    ends = Counter(str(attempt.end) for group in groups for attempt in group.branches)
    return {"branches": dict(ends)} if ends else {}


def _publication(run: TrainingRun) -> dict[str, Any]:
    """Returns how the last version reached the servers; nothing where there are none."""
    last: Publication | None = getattr(run.publisher, "last", None)
    return {"publish_way": last.way, "publish_s": round(last.seconds, 3), "publish_bytes": last.bytes} if last else {}


def policy_metrics(
    run: TrainingRun, ready: ReadyStep, metrics: dict[str, UpdateMetrics], *, version: int
) -> dict[str, dict[str, Any]]:
    """Returns the part of a step's metrics that is separate for each policy."""
    made = dict[str, dict[str, Any]]()
    for policy, section in run.config.policies.items():
        views = [group_of(group, policy) for group in ready.lease.groups]
        attempts = [attempt for view in views for attempt in view.rollouts]
        rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
        made[policy] = {
            "frozen": section.frozen,
            "rollouts": len(attempts),
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "calls": sum(len(attempt.steps) for attempt in attempts),
            "sampled_tokens": sum(step.sampled for attempt in attempts for step in attempt.steps),
        }
        if policy in run.learners:
            credit = ready.update.credit[policy]
            made[policy] |= {
                "updates": run.learners[policy].updates,
                "groups_equal": credit.counts["groups_equal"],
                "masked": _masked(credit),
                **asdict(metrics.get(policy, UpdateMetrics(lr=run.learners[policy].section.lr))),
                **staleness(credit.sequences, version),
            }
    return made


def total_credit(credit: dict[str, CreditedSequences], groups: Sequence[Group]) -> CreditedSequences:
    """Adds up what all policies were credited with. A group that taught none of them counts as one of equal reward."""
    if len(credit) == 1:
        return next(iter(credit.values()))
    made = [sequence for each in credit.values() for sequence in each.sequences]
    counts, taught = Counter[str](), {sequence.group_id for sequence in made}
    for each in credit.values():
        counts.update(each.counts)
    counts["groups_equal"] = sum(bool(group.graded) and group.id not in taught for group in groups)
    return CreditedSequences(made, counts)


def _masked(credit: CreditedSequences) -> dict[str, int]:
    return {key.removeprefix("masked."): n for key, n in credit.counts.items() if key.startswith("masked.")}


def staleness(made: Sequence[TrainingSequence], version: int) -> dict[str, float | int]:
    """Returns the mean and maximum of how many versions trained tokens are behind `version`."""
    found = Counter[int]()
    for sequence in made:
        found.update(version - each for each, trained in zip(sequence.versions, sequence.trained, strict=True) if trained)
    total = sum(age * count for age, count in found.items())
    return {"staleness": total / found.total() if found else 0.0, "staleness_max": max(found, default=0)}


class SamplingSpeed:
    """How many tokens are sampled in a second. In an asynchronous run a step's own tokens were sampled during earlier steps, so it
    counts what the pool got since the last step, over the whole time since then.
    """

    def __init__(self, pool: Pool, tokens: int) -> None:
        self._pool, self._tokens, self._clock = pool, tokens, Stopwatch()

    @classmethod
    async def begin(cls, pool: Pool) -> "SamplingSpeed":
        return cls(pool, (await pool.stats("train")).tokens)

    async def lap(self) -> float:
        """Returns the speed since the last lap, in tokens per second."""
        before, self._tokens = self._tokens, (await self._pool.stats("train")).tokens
        return round((self._tokens - before) / max(self._clock.lap(), 1e-9), 1)


class Stopwatch:
    def __init__(self) -> None:
        self._last = asyncio.get_running_loop().time()

    def lap(self) -> float:
        """Returns the seconds since the last lap, or since construction."""
        before, self._last = self._last, asyncio.get_running_loop().time()
        return self._last - before


class ScoreWriter:
    """Writes scores in a thread while training continues, one step after the other. Leaving it waits for the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing: asyncio.Task[None] | None = None

    async def write(self, step: int, updates: Mapping[str, LearnerUpdate]) -> None:
        """Begins to write, once the step before is written."""
        await self._finish()
        self._writing = asyncio.create_task(asyncio.to_thread(write_scores, self._folder, step, updates))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._finish()

    async def _finish(self) -> None:
        if self._writing is not None:
            await self._writing


def write_scores(folder: Path, step: int, updates: Mapping[str, LearnerUpdate]) -> None:
    """Writes the scores of a step's first update, by policy. A failure does not stop the run."""
    if not updates or sum(update.batch.trained_tokens for update in updates.values()) > MOST_TOKENS:
        return
    lines = [line for policy, update in updates.items() for line in score_lines(update.batch, update.result, policy)]
    try:
        (folder / "scores").mkdir(exist_ok=True)
        write_file(folder / "scores" / f"{step:06d}.jsonl", b"".join(lines), durable=False)
    except OSError as error:
        log.warning("the scores of step %d cannot be written, so `penstock view` will not show them: %s", step, error)


def score_lines(batch: Batch, result: UpdateResult, policy: str = "") -> Iterator[bytes]:
    """Yields a line for each sequence of the batch."""
    size = sum(len(sequence.token_ids) for sequence in batch.sequences)
    logprobs, entropy = [0.0] * size, [0.0] * size
    scored, spreads = cast("list[float]", result.proximal.tolist()), cast("list[float]", result.entropy.tolist())
    for number, logprob, spread in zip(batch.term_numbers(), scored, spreads, strict=True):
        logprobs[number], entropy[number] = logprob, spread
    start = 0
    for sequence in batch.sequences:
        span = slice(start, start + len(sequence.token_ids))
        yield orjson.dumps(_line(sequence, logprobs[span], entropy[span], policy), option=orjson.OPT_APPEND_NEWLINE)
        start = span.stop


def _line(sequence: TrainingSequence, logprobs: list[float], entropy: list[float], policy: str) -> dict[str, Any]:
    gap = [new - old for new, old in zip(logprobs, sequence.logprobs, strict=True)]
    for place, unknown in enumerate(sequence.recomputed):
        gap[place] = 0.0 if unknown else gap[place]
    return {
        "rollout_id": sequence.rollout_id,
        **({"policy": policy} if policy else {}),
        "gap": _pack_halves(compress(gap, sequence.trained)),
        "entropy": _pack_halves(compress(entropy, sequence.trained)),
        "advantages": _runs(compress(sequence.advantages, sequence.trained)),
        "steps": _runs(compress(sequence.steps, sequence.trained)),
    }


def _runs(values: Iterable[float]) -> list[list[float]]:
    return [[sum(1 for _ in same), value] for value, same in groupby(values)]


def _pack_halves(values: Iterable[float]) -> str:
    bounded = [max(-HALF_MAX, min(HALF_MAX, value)) for value in values]
    return base64.b64encode(struct.pack(f"<{len(bounded)}e", *bounded)).decode()
