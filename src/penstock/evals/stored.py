"""An evaluation's folder, read back: its settings and what its pool holds."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from penstock.errors import ConfigError
from penstock.evals.attempts import stored
from penstock.evals.spending import Prices, prices_of, rollout_seconds
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Group


class Stored(NamedTuple):
    """What is there."""

    config: dict[str, Any]
    summary: dict[str, Any]
    groups: list[Group]
    seconds: Mapping[str, float] = MappingProxyType({})
    """How long rollouts took, by their id; those of which it is known."""

    @property
    def prices(self) -> Prices | None:
        """Those of its last run, which may have changed them, else those that it was begun with."""
        told = self.summary.get("prices")
        return Prices(**told) if told else prices_of(self.config)


async def read_evaluation(folder: Path) -> Stored:
    """ConfigError where the folder is none that `penstock eval run` made."""
    try:
        config: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())["config"]
        file = folder / "summary.json"
        summary: dict[str, Any] = orjson.loads(file.read_bytes()) if file.exists() else {}
    except (OSError, ValueError, LookupError, TypeError) as cause:
        raise _none(folder) from cause
    pool: Pool = POOLS.load(config["pool"]["name"])(folder, url=config["pool"].get("url", ""))
    try:
        groups = [group async for group in stored(pool)]
    finally:
        await pool.close()
    if not groups:
        raise _none(folder)
    return Stored(config, summary, groups, rollout_seconds(folder / "events.jsonl"))


def _none(folder: Path) -> ConfigError:
    return ConfigError(f"{folder}: not an evaluation; give a folder that `penstock eval run` made, such as runs/evals/multiply")
