"""A recorded run, opened for reading: also while it runs, and on a colleague's machine. Needs no torch."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.config import RunConfig
from penstock.errors import ConfigError, ModelError
from penstock.models import find_cached
from penstock.pool.base import Pool
from penstock.pool.location import find_pool, open_pool_at
from penstock.records import Group
from penstock.run.folder import RunFolder, find_run_folder

PAGE_GROUPS = 8
"""Groups in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One channel of a run: the groups from `first_seq` to `last_seq`."""

    folder: RunFolder
    config: RunConfig
    pool: Pool
    channel: str
    first_seq: int
    last_seq: int

    @property
    def start_policy(self) -> Path | None:
        """The folder of the start policy; None where it is not on this machine."""
        return _model_folder(self.config.model.name)

    def start_weights(self, policy: str) -> Path | None:
        """The folder of the weights that a policy began with; None where it is not on this machine, or an endpoint has them."""
        section = self.config.policies[policy]
        elsewhere = section.engine is not None and section.engine.text_only
        return None if elsewhere else _model_folder(section.model or self.config.model.name)

    async def pages(self) -> AsyncIterator[list[Group]]:
        """Yields the groups in order, a few at a time; groups opened since the run was opened are left out."""
        seq = self.first_seq
        while page := await self.pool.groups(self.channel, first_seq=seq, limit=min(PAGE_GROUPS, self.last_seq + 1 - seq)):
            yield page
            seq = page[-1].seq + 1


def _model_folder(name: str) -> Path | None:
    try:
        model = find_cached(name)
    except ModelError:
        return None
    return model.path if model else None


@asynccontextmanager
async def open_recorded_run(path: Path, *, channel: str, limit: int | None = None) -> AsyncGenerator[RecordedRun]:
    """Open the run in folder `path` to read all groups of a channel, or the `limit` newest; ConfigError if there are none."""
    folder = find_run_folder(path)
    config = folder.config()
    if config.engine.text_only:
        text = f"{path}: {config.model.name} answered as text from an endpoint (engine.name = {config.engine.name!r})"
        raise ConfigError(f"{text}, and its tokens were never here: there is nothing to verify")
    async with open_pool_at(find_pool(path)) as pool:
        stats = await pool.stats(channel)
        if not stats.steps:
            others = [f"--channel {name}" for name in await pool.channels() if name != channel]
            remedy = f"take {' or '.join(others)}" if others else "wait for it"
            raise ConfigError(f"{path}: no step has been recorded in channel {channel!r} yet; {remedy}")
        first = 0 if limit is None else max(0, stats.last_seq + 1 - limit)
        yield RecordedRun(folder=folder, config=config, pool=pool, channel=channel, first_seq=first, last_seq=stats.last_seq)
