"""One process at a time: what a killed run left running for a moment must end before the next one touches its folder."""

import asyncio
import fcntl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.errors import ConfigError

WAIT_S = 60.0
_LOOK_S = 0.1


@asynccontextmanager
async def alone(path: Path) -> AsyncGenerator[None]:
    """Hold the file `path` for this process, once whoever holds it has died; ConfigError where it lives on for a minute."""
    with path.open("w") as file:
        try:
            async with asyncio.timeout(WAIT_S):
                while not _locked(file.fileno()):  # noqa: ASYNC110 - the kernel wakes nobody who waits without blocking
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise ConfigError(f"{path}: another process is at work on this run; wait for it or pick another run.name") from None
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
