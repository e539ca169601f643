"""Which processes of an evaluation live: each holds a shared lock on a file, and who takes the evaluation up waits for the last."""

import asyncio
import fcntl
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import PenstockError
from penstock.events import Events

LEAVE_S = 15.0
"""For a process to let go of everything once its parent is gone; it is then ended as it is."""
LOOK_S = 0.05


async def await_others(folder: Path, events: Events) -> None:
    """Wait until the processes of a command that was killed are gone: what they still write belongs to its attempts."""
    loop = asyncio.get_running_loop()
    deadline, told = loop.time() + 2 * LEAVE_S, False
    with _file(folder).open("w") as file:
        while not _is_free(file.fileno()):
            if loop.time() > deadline:
                raise PenstockError(f"{folder}: processes of an earlier command still run; end them (`fuser {_file(folder)}`)")
            if not told:
                events.emit("stage", text="waiting for processes of an earlier command to end")
            told = True
            await asyncio.sleep(LOOK_S)


@contextmanager
def present(folder: Path) -> Generator[int]:
    """Be counted among them; ends with the process at the latest, and with the last one that has inherited the descriptor."""
    with _file(folder).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield file.fileno()


def _file(folder: Path) -> Path:
    return folder / ".processes"


def _is_free(lock: int) -> bool:
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
