"""Finds the pool of a folder: its own file, or the database that its config names."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.config import PoolSection, validate
from penstock.errors import ConfigError
from penstock.pool import POOLS
from penstock.pool.base import Pool, PoolClass


class PoolLocation(NamedTuple):
    """Where a pool is."""

    name: str
    folder: Path
    url: str = ""

    @property
    def kind(self) -> type[PoolClass]:
        return POOLS.load(self.name)


def find_pool(folder: Path) -> PoolLocation:
    """Locate the pool of a run's or a gateway's folder, or an imported one; ConfigError if there is none to read."""
    section = _read_section(folder)
    if section is None and POOLS.load(PoolSection().name).why_unreadable(folder):
        raise ConfigError(
            f"{folder}: not a run folder; give one that `penstock train` or `penstock gateway` made, such as runs/multiply"
        )
    return existing_pool(folder, section or PoolSection())


def existing_pool(folder: Path, section: PoolSection) -> PoolLocation:
    """Locate the pool of a run with this config; ConfigError if there is none to read."""
    location = PoolLocation(section.name, folder, section.url)
    if reason := location.kind.why_unreadable(folder):
        raise ConfigError(f"{folder}: {reason}")
    return location


@asynccontextmanager
async def open_pool_at(location: PoolLocation) -> AsyncGenerator[Pool]:
    pool: Pool = POOLS.load(location.name)(location.folder, url=location.url)
    try:
        await refuse_foreign_pool(pool, location.folder)
        yield pool
    finally:
        await pool.close()


async def refuse_foreign_pool(pool: Pool, folder: Path) -> None:
    """ConfigError if the pool belongs to another run than the `config.json` in `folder`. Older runs have no id to compare."""
    try:
        settings: Any = orjson.loads((folder / "config.json").read_bytes())
        run_id = settings.get("id", "") if "datasets" in settings else None
    except (OSError, ValueError, AttributeError, TypeError):
        return
    if run_id is not None and await pool.run_id() not in ("", run_id):
        raise ConfigError(
            f"{folder}: its pool and its config.json belong to different runs; restore the one that was replaced, "
            "or start over with --fresh, which moves this run aside"
        )


def _read_section(folder: Path) -> PoolSection | None:
    """Read `[pool]` from a run's config.json; None without one. A checkpoint has a config.json too, of its model."""
    try:
        settings: Any = orjson.loads((folder / "config.json").read_bytes())
        pool = settings["config"]["pool"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return validate(PoolSection, pool, str(folder / "config.json"))
