"""Engines for `bench.scale`: the same reply to every request, after a wait, in at most `engine.slots` requests at once."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path

from penstock.chat.tokenizer import Tokenizer
from penstock.config import EngineSection
from penstock.engines.base import SampledChunk
from penstock.records import Sampling
from penstock.testing import ScriptedEngine

SAID = "I have looked it up: the number is 42."
SLOTS = 32
"""Where `engine.slots` is not set, as on a CPU."""
SLOW_S = 0.2


class TimedEngine(ScriptedEngine):
    """Serves `slots` requests at once, each for `wait_s`; others queue."""

    wait_s: float
    slots: asyncio.Semaphore
    whole: SampledChunk

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        async with self.slots:
            if self.wait_s:
                await asyncio.sleep(self.wait_s)
        yield self.whole


def open_timed(
    wait_s: float,
    folder: Path,
    *,
    name: str,
    section: EngineSection,
    seed: int,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> TimedEngine:
    """Opened as a run opens its engine."""
    tokenizer = Tokenizer.load(folder)
    engine = TimedEngine([], tokenizer, model=name)
    ids = (*tokenizer.encode(SAID), *tokenizer.eos_ids[:1])
    logprobs = (-0.5,) * len(ids)
    engine.wait_s, engine.slots = wait_s, asyncio.Semaphore(section.slots or SLOTS)
    engine.whole = SampledChunk(ids, logprobs, logprobs, (0,) * len(ids), "stop")
    return engine


open_quick = partial(open_timed, 0.0)
open_slow = partial(open_timed, SLOW_S)
open_tenth = partial(open_timed, 0.1)
