"""AsyncRollouter: an actor with engine, gateway, runner and scheduler, which makes rollouts for a trainer elsewhere."""

import asyncio
import os
import shutil
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from penstock.records import BranchPoint
from penstock.run.opening import open_pool
from penstock.scale.actor_calls import EventBuffer
from penstock.scale.run_spec import RunSpec, exclusive_process
from penstock.system.processes import relax_gc
from penstock.train.publishing import PUBLISHED_KEPT
from penstock.train.resources import LocalRollouts, open_rollouts

T = TypeVar("T")


class AsyncRollouter:
    """Opened by the first call. After Ray restarted its process it serves version 0 until it is given weights."""

    def __init__(self, folder: str) -> None:
        relax_gc()
        self._spec = RunSpec.read(folder)
        self._events = EventBuffer()
        self._stack: AsyncExitStack | None = None
        self._rollouts: LocalRollouts | None = None
        self._opening = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._listening = False

    async def begin(self) -> bool:
        """Prepare for a trainer that starts: what runs for an earlier one is cancelled, with its tokens recorded."""
        await self._close_rollouts()
        await self._ensure_open()
        return True

    async def run(self, steps_trained: int, version: int) -> bool:
        """See `RolloutSource.run`. False, at once, where this process was never given `version`."""
        rollouts = await self._ensure_open()
        if rollouts.engine.version < version:
            return False
        rollouts.advance(steps_trained)
        await self._cancellable(rollouts.run())
        return True

    async def evaluate(self, version: int) -> list[str] | None:
        """See `RolloutSource.evaluate`. None, at once, where this process was never given `version`."""
        rollouts = await self._ensure_open()
        return None if rollouts.engine.version < version else await self._cancellable(rollouts.evaluate())

    async def branch(self, points: list[tuple[str, int]], version: int) -> list[str] | None:
        """See `RolloutSource.branch`; `points` are rollout ids and steps. None, at once, where it was never given `version`."""
        rollouts = await self._ensure_open()
        if rollouts.engine.version < version:
            return None
        named = [BranchPoint(rollout_id=name, step=step) for name, step in points]
        return await self._cancellable(rollouts.branch(named))

    async def advance(self, steps_trained: int) -> None:
        if self._rollouts is not None:
            self._rollouts.advance(steps_trained)

    async def stop(self) -> None:
        if self._rollouts is not None:
            self._rollouts.stop()

    async def load(self, version: int, names: list[str], *contents: bytes) -> None:
        """See `RolloutSource.load`; `contents` are the files `names` of a model folder."""
        rollouts = await self._ensure_open()
        kept = Path(self._spec.run_folder) / "received"
        folder = kept / f"{version:06d}"
        await asyncio.to_thread(_write, folder, dict(zip(names, contents, strict=True)))
        await rollouts.load(version, folder)
        for old in sorted(each for each in kept.iterdir() if each != folder)[: 1 - PUBLISHED_KEPT]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    async def ready(self) -> None:
        """Returns once the process has started."""

    async def take_events(self) -> list[bytes]:
        """Returns the events since the last call."""
        return await self._events.take()

    async def close(self) -> None:
        """Cancel everything that runs and close everything."""
        await self._close_rollouts()
        self._events.close()

    async def _ensure_open(self) -> LocalRollouts:
        async with self._opening:
            if self._rollouts is None:
                self._rollouts = await self._open()
            return self._rollouts

    async def _open(self) -> LocalRollouts:
        if not self._listening:
            self._listening = True
            self._events.open()
            self._events.events.emit("rollouter.start", pid=os.getpid())
        torch.set_num_threads(self._spec.threads)
        config, folder = self._spec.make_config(), self._spec.make_folder(resumed=True)
        inputs = self._spec.make_inputs(config, self._spec.load_agent())
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(exclusive_process(folder.path / ".rollouter.lock"))
            pool = open_pool(config, folder)
            stack.push_async_callback(pool.close)
            opened = open_rollouts(config, inputs, folder, self._events.events, pool)
            rollouts = await stack.enter_async_context(opened)
            self._stack = stack.pop_all()
        return rollouts

    async def _close_rollouts(self) -> None:
        async with self._opening:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
            stack, self._stack, self._rollouts = self._stack, None, None
            if stack is not None:
                await stack.aclose()

    async def _cancellable(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` such that a new trainer can cancel it, since the one that asked for it may be dead."""
        task = asyncio.create_task(work)
        self._running.add(task)
        try:
            return await task
        finally:
            task.cancel()
            await asyncio.wait({task})
            self._running.discard(task)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
