"""New weights from the trainer to what samples with them, while it samples."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from penstock.engines.base import Engine
from penstock.train import policy
from penstock.train.learner import Learner

KEPT = 2
"""Published folders: the one that is served, and the one before, which a slow reader may still have open."""


class Publisher(Protocol):
    """How weights get there."""

    async def begin(self) -> None:
        """See that what samples holds the start policy, as version 0."""
        ...

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        """Run `change`, which rewrites the learner's weights in place; from then on what is sampled is `version`."""
        ...


class InPlace:
    """The engine samples with the learner's own tensors: the change is made between two of its tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def begin(self) -> None:
        """Nothing to do: it is the very same one."""

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        """See `Publisher.publish`."""
        await self._engine.swap(version, change)


class FromDisk:
    """The engine has weights of its own: each version is written as a model folder, which `load` then hands over."""

    def __init__(self, learner: Learner, *, model: Path, scratch: Path, load: Callable[[int, Path], Awaitable[None]]) -> None:
        self._learner, self._model, self._scratch, self._load = learner, model, scratch, load
        shutil.rmtree(scratch, ignore_errors=True)

    async def begin(self) -> None:
        """See `Publisher.begin`. A server may still hold what an earlier run left there."""
        await self._load(0, self._model)

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        """See `Publisher.publish`."""
        folder = self._scratch / f"{version:06d}"
        await asyncio.to_thread(self._write, folder, change)
        await self._load(version, folder)
        for old in sorted(self._scratch.iterdir())[:-KEPT]:
            await asyncio.to_thread(shutil.rmtree, old)

    def _write(self, folder: Path, change: Callable[[], None]) -> None:
        change()
        policy.write_model(folder, self._learner.decoder, self._model)
