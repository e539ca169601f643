"""Engines as one of several policies sees them: the adapter of a policy on a shared base, or weights that never change."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from penstock.engines.base import AdapterEngine, Engine, SampledChunk
from penstock.records import Sampling


class PolicyEngine:
    """See `Engine`: an engine with several adapters, asked for one policy's. Its owner closes it and publishes weights."""

    def __init__(self, engine: AdapterEngine, policy: str) -> None:
        self._engine, self._policy = engine, policy

    @property
    def model(self) -> str:
        return self._engine.model

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def version(self) -> int:
        return self._engine.version_of(self._policy)

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        return self._engine.generate(prompt_ids, sampling, rollout_id=rollout_id, policy=self._policy)

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        await self._engine.swap(version, change)

    async def load(self, version: int, folder: Path) -> None:
        await self._engine.load(version, folder, policy=self._policy)

    async def close(self) -> None: ...


class FrozenEngine:
    """See `Engine`: an engine whose weights never change. Its tokens carry the version that the trained policies have meanwhile.

    A version of a run names the weights of all its policies, so this is the one that sampled them; and tokens of a frozen policy do
    not make a group look stale.
    """

    def __init__(self, engine: Engine, version: Callable[[], int]) -> None:
        self._engine, self._version = engine, version

    @property
    def model(self) -> str:
        return self._engine.model

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def version(self) -> int:
        return self._version()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        async with aclosing(self._engine.generate(prompt_ids, sampling, rollout_id=rollout_id)) as chunks:
            async for chunk in chunks:
                yield replace(chunk, versions=(self._version(),) * len(chunk.ids))

    async def swap(self, version: int, change: Callable[[], None]) -> None: ...

    async def load(self, version: int, folder: Path) -> None: ...

    async def close(self) -> None: ...
