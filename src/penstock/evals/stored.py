"""An evaluation's folder, read back: its settings and what its pool holds."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from penstock.errors import ConfigError
from penstock.evals.attempts import CHANNEL, stored
from penstock.evals.spending import Prices, prices_of, rollout_seconds
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Group


class Stored(NamedTuple):
    """What is there."""

    config: dict[str, Any]
    summary: dict[str, Any]
    pool: Pool
    seconds: Mapping[str, float] = MappingProxyType({})
    """How long rollouts took, by their id; those of which it is known."""

    @property
    def prices(self) -> Prices | None:
        """Those of its last run, which may have changed them, else those that it was begun with."""
        told = self.summary.get("prices")
        return Prices(**told) if told else prices_of(self.config)

    def groups(self) -> AsyncGenerator[Group]:
        """See `stored`."""
        return stored(self.pool)


@asynccontextmanager
async def open_evaluation(folder: Path) -> AsyncGenerator[Stored]:
    """ConfigError where the folder is none that `penstock eval run` made."""
    try:
        config: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())["config"]
        file = folder / "summary.json"
        summary: dict[str, Any] = orjson.loads(file.read_bytes()) if file.exists() else {}
    except (OSError, ValueError, LookupError, TypeError) as cause:
        raise _none(folder) from cause
    pool: Pool = POOLS.load(config["pool"]["name"])(folder, url=config["pool"].get("url", ""))
    try:
        if not (await pool.stats(CHANNEL)).groups:
            raise _none(folder)
        yield Stored(config, summary, pool, rollout_seconds(folder / "events.jsonl"))
    finally:
        await pool.close()


def _none(folder: Path) -> ConfigError:
    return ConfigError(f"{folder}: not an evaluation; give a folder that `penstock eval run` made, such as runs/evals/multiply")
