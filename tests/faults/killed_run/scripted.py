"""An engine whose replies depend on the prompt and the rollout's place in its group, and on nothing else."""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from penstock.chat.tokenizer import Tokenizer
from penstock.config import EngineSection
from penstock.engines.base import SampledChunk
from penstock.records import Sampling
from penstock.testing import ScriptedEngine


class ByPlace(ScriptedEngine):
    """Replays: a second attempt at the same place gets the same replies as the first. Takes adapters of several policies."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = "", policy: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        parts = rollout_id.split(".")
        place = "".join((parts[1], *parts[3:5]))  # of a branch: the place of its rollout, the step, and its own place
        rng = random.Random(f"{policy} {place} {tuple(prompt_ids)}".strip())
        self._next = lambda prompt: "".join(rng.choices("abcdef ", k=rng.randrange(3, 9)))
        async with aclosing(super().generate(prompt_ids, sampling, rollout_id=rollout_id)) as chunks:
            async for chunk in chunks:
                yield chunk

    def version_of(self, policy: str) -> int:
        return self.version

    async def load(self, version: int, folder: Path, *, policy: str = "") -> None:
        self.version = version


def open_engine(
    folder: Path, *, name: str, section: EngineSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> ByPlace:
    return ByPlace([], Tokenizer.load(folder), model=name)
