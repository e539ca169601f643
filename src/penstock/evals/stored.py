"""An evaluation's folder, read back: its settings and what its pool holds."""

from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.errors import ConfigError
from penstock.evals.attempts import stored
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Group


class Stored(NamedTuple):
    """What is there."""

    config: dict[str, Any]
    summary: dict[str, Any]
    groups: list[Group]


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
    return Stored(config, summary, groups)


def _none(folder: Path) -> ConfigError:
    return ConfigError(f"{folder}: not an evaluation; give a folder that `penstock eval run` made, such as runs/evals/multiply")
