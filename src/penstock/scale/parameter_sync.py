"""ParameterSynchronizer: an actor that holds the weights of the current policy version and loads them into the rollouter."""

import asyncio
from pathlib import Path
from typing import Any

from penstock.engines.embedded.weights import MODEL_SUFFIXES
from penstock.errors import TrainError
from penstock.scale.actor_calls import MAX_DEATHS, ActorGone, call_result, get_actor, wait_restarted
from penstock.scale.package import ray

FILES = (*MODEL_SUFFIXES, ".safetensors")
"""How the names of a model folder's files end."""


class ParameterSynchronizer:
    """It outlives trainer and rollouter, so that one that comes back finds the weights here, in the cluster's object store."""

    def __init__(self, rollouter: str) -> None:
        self._rollouter = rollouter
        self._files: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        """A call of a trainer that died ends before the next trainer's begins."""

    async def publish(self, version: int, folder: str) -> None:
        """Hold the files of a model folder and load them into the rollouter as `version`; returns once they are served."""
        async with self._turn:
            self._files = await asyncio.to_thread(_put, Path(folder))
            await self._load(version)

    async def _load(self, version: int) -> None:
        rollouter = get_actor(self._rollouter)
        for _ in range(MAX_DEATHS):
            try:
                await call_result(rollouter.load.remote(version, list(self._files), *self._files.values()))
                return
            except ActorGone:  # it restarts without these weights
                await wait_restarted(rollouter)
        raise TrainError(f"policy version {version} reached no rollouter: {MAX_DEATHS} died over it; see Ray's logs")


def _put(folder: Path) -> dict[str, Any]:
    return {file.name: ray.put(file.read_bytes()) for file in sorted(folder.iterdir()) if file.suffix in FILES}
