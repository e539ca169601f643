"""What the trainer computed of each trained token, kept in `scores/` of the run folder, a file per step.

A line is one sequence: the log-probability of its trained tokens less the engine's, before the step's first update, and their
entropy, both as half-precision numbers in base64; and its advantages and steps as runs of `[count, value]`. Training reads none
of it.
"""

import asyncio
import base64
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, groupby
from math import inf
from pathlib import Path
from typing import Any, Protocol, Self, cast

import orjson

from penstock.records import Sequence
from penstock.system.files import write_file
from penstock.train.batches import Batch
from penstock.train.learner import UpdateResult

MOST_TOKENS = 50_000
"""A step that trains more tokens keeps no scores: laying them out takes a second for every hundred thousand."""
HALF_MAX = 65504.0
log = logging.getLogger(__name__)


class ScoredUpdate(Protocol):
    @property
    def batch(self) -> Batch: ...

    @property
    def result(self) -> UpdateResult: ...


class ScoreWriter:
    """Writes scores in a thread while training goes on, one step after the other. Leaving it waits for the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing: asyncio.Task[None] | None = None

    async def write(self, step: int, updates: Mapping[str, ScoredUpdate]) -> None:
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


def write_scores(folder: Path, step: int, updates: Mapping[str, ScoredUpdate]) -> None:
    """Writes the scores of a step's first update, by policy. A run goes on if that fails."""
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


def _line(sequence: Sequence, logprobs: list[float], entropy: list[float], policy: str) -> dict[str, Any]:
    gap = [0.0 if old == inf else new - old for new, old in zip(logprobs, sequence.logprobs, strict=True)]
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
