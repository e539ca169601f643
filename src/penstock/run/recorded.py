"""A run's record, opened to be read: also while the run goes on, and on a colleague's machine. Needs no torch."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.config import RunConfig
from penstock.errors import ConfigError, ModelError
from penstock.models import cached
from penstock.pool.base import Pool
from penstock.pool.location import existing_pool, open_pool_at
from penstock.records import Group
from penstock.run.folder import RunFolder, find_run_folder

PAGE = 8
"""Groups in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One channel of a run."""

    folder: RunFolder
    config: RunConfig
    pool: Pool
    channel: str
    first_seq: int
    """Of the groups that are to be read, as is the next."""
    last_seq: int

    @property
    def start(self) -> Path | None:
        """The folder of the start policy; None where it is not on this machine."""
        try:
            model = cached(self.config.model.name)
        except ModelError:
            return None
        return model.path if model else None

    async def pages(self) -> AsyncIterator[list[Group]]:
        """The groups in order, a few at a time; those that come to be meanwhile are left out."""
        seq = self.first_seq
        while page := await self.pool.groups(self.channel, first_seq=seq, limit=min(PAGE, self.last_seq + 1 - seq)):
            yield page
            seq = page[-1].seq + 1


@asynccontextmanager
async def open_recorded(path: Path, *, channel: str, limit: int | None = None) -> AsyncGenerator[Recorded]:
    """Open the run in folder `path` to read all groups of a channel, or the `limit` newest; ConfigError where there is nothing."""
    folder = find_run_folder(path)
    config = folder.config()
    if config.engine.relays:
        text = f"{path}: {config.model.name} answered as text from an endpoint (engine.name = {config.engine.name!r})"
        raise ConfigError(f"{text}, and its tokens were never here: there is nothing to verify")
    async with open_pool_at(existing_pool(path, config.pool)) as pool:
        stats = await pool.stats(channel)
        if not stats.steps:
            raise ConfigError(f"{path}: no step has been recorded in channel {channel!r} yet; wait for it, or name another channel")
        first = 0 if limit is None else max(0, stats.last_seq + 1 - limit)
        yield Recorded(folder=folder, config=config, pool=pool, channel=channel, first_seq=first, last_seq=stats.last_seq)
