"""Decode tokens per second of the embedded engine over transformers' `generate`, same model, same machine, same run.

The demo's shapes: prompts of 375 tokens that share 360, replies of 32 tokens, sampled at temperature 1; one row has prompts that
share nothing. Both sides start with their prompts in the cache, so that decoding is what is compared: `generate` gets a cache
that was filled before, the engine has served the prompts once. Runs alternate and medians are compared: machines are noisy.
"""

import asyncio
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.engines.embedded.core import EngineCore
from penstock.engines.embedded.decoder import load_decoder
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.models import resolve
from penstock.records import Sampling

PROMPT, SHARED, REPLY = 375, 360, 32


class Row(NamedTuple):
    """One line of the comparison."""

    batch: int
    shared: int
    """Tokens that all prompts have in common."""
    repeats: int = 3

    @property
    def name(self) -> str:
        return f"batch {self.batch}" + ("" if self.shared else ", distinct prompts")


ROWS = (Row(1, SHARED, repeats=9), Row(8, SHARED), Row(32, SHARED), Row(8, 0))


def main() -> None:
    folder = resolve("smollm2-135m").path
    asyncio.run(_compare(folder))


async def _compare(folder: Path) -> None:
    peer = Peer(folder)
    core = EngineCore(load_decoder(folder), slots=32, cache_tokens=65536)
    engine = EmbeddedEngine(core, name="bench", queue_limit=32, seed=0)
    vocabulary = engine.decoder.shape.vocab_size
    for row in ROWS:
        prompts = _prompts(row, vocabulary)
        await _generate(engine, prompts, 2)
        peer.prepare(prompts)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(row.repeats):
            theirs.append(_timed(peer.generate))
            started = time.perf_counter()
            await _generate(engine, prompts, REPLY)
            ours.append(time.perf_counter() - started)
        _tell(row, statistics.median(ours), statistics.median(theirs))
    await engine.close()


def _tell(row: Row, ours_s: float, theirs_s: float) -> None:
    tokens = row.batch * REPLY
    ratio = theirs_s / ours_s
    verdict = "" if ratio > 1.0 else "  BEHIND"
    print(f"decode, {row.name}: {ratio:.2f} x ({tokens / ours_s:.0f} over {tokens / theirs_s:.0f} tokens/s){verdict}", flush=True)


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _prompts(row: Row, vocabulary: int) -> list[list[int]]:
    rng = random.Random(row.batch)
    shared = [rng.randrange(vocabulary) for _ in range(row.shared)]
    return [shared + [rng.randrange(vocabulary) for _ in range(PROMPT - row.shared)] for _ in range(row.batch)]


async def _generate(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    async def read(prompt: Sequence[int]) -> None:
        async for _ in engine.generate(prompt, Sampling(max_tokens=tokens)):
            pass

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(read(prompt))


class Peer:
    """transformers' `generate` with a filled cache."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers.cache_utils import DynamicCache
            from transformers.models.auto.modeling_auto import AutoModelForCausalLM
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._new_cache = DynamicCache

    def prepare(self, prompts: Sequence[Sequence[int]]) -> None:
        """Fill the cache with the first prompt, once per row: how fast `generate` is does not depend on what the tokens are."""
        self._ids = torch.tensor(prompts[0])[None]
        self._cache: Any = self._new_cache(config=self._model.config)
        with torch.inference_mode():
            self._model(self._ids[:, :-1], past_key_values=self._cache)
        self._cache.batch_repeat_interleave(len(prompts))
        self._ids = self._ids.expand(len(prompts), -1)
        self.generate(2)

    def generate(self, tokens: int = REPLY) -> None:
        """Sample `tokens` per row, whatever they are, and leave the cache as it was."""
        self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            past_key_values=self._cache,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        self._cache.crop(PROMPT - 1 - self._cache.get_seq_length())
