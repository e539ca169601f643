"""Scratch folders: where an agent writes while it runs, apart from the run folder. At its end, what it left is moved there."""

import asyncio
import os
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp

from penstock.config import scratch_folder
from penstock.events import Events
from penstock.system.async_tools import finish_shielded
from penstock.system.locks import FileLock

PREFIX = "penstock-scratch-"
LOCK = ".lock"
YOUNG_S = 60.0
"""A root that is younger may not be locked yet by the process that made it."""


class ScratchFolders:
    """The scratch folders of one process. Their common root is removed with this object, and by a later process after a kill."""

    def __init__(self, events: Events | None = None) -> None:
        self._events = events or Events()

    @cached_property
    def root(self) -> Path:
        """Other users may enter it, since an agent may run as one, but not list it."""
        place = scratch_folder()
        _remove_stale(place)
        root = Path(mkdtemp(prefix=PREFIX, dir=place))
        self._lock = FileLock(root / LOCK)
        self._lock.try_acquire()
        root.chmod(0o711)
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        return root

    @asynccontextmanager
    async def folder_for(self, destination: Path | None) -> AsyncGenerator[Path | None]:
        """Yields the path of a folder of that name, to be made; on exit it is moved to `destination`. None yields None."""
        if destination is None:
            yield None
            return
        folder = self.root.joinpath(secrets.token_hex(16), destination.name)
        try:
            yield folder
        finally:
            if folder.exists():
                await finish_shielded(asyncio.to_thread(self._collect, folder, destination))

    def _collect(self, folder: Path, destination: Path) -> None:
        if left_out := make_safe(folder):
            self._events.emit("artifacts.left_out", rollout_id=destination.name, names=left_out[:20], count=len(left_out))
        try:
            move_folder(folder, destination)
        except OSError as error:  # a full disk: the rollout counts all the same
            self._events.emit("artifacts.lost", rollout_id=destination.name, message=str(error))
        shutil.rmtree(folder.parent, ignore_errors=True)


def make_safe(folder: Path) -> list[str]:
    """Removes links that lead out of the folder and all that is no file or folder; returns their names. The rest becomes ours.

    A reader who follows no more than what is left stays in the folder, and waits for nobody.
    """
    top, removed = folder.resolve(), list[str]()
    for path in _entries(folder):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            inside = not path.readlink().is_absolute() and path.resolve().is_relative_to(top)
        else:
            inside = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        if not inside:
            path.unlink()
            removed.append(str(path.relative_to(folder)))
        elif os.geteuid() == 0 and path.lstat().st_uid != 0:
            os.chown(path, 0, 0, follow_symlinks=False)
    with suppress(OSError):
        if os.geteuid() == 0:
            os.chown(folder, 0, 0)
        folder.chmod(0o755)
    return removed


def move_folder(folder: Path, destination: Path) -> None:
    """Moves a folder to where there is none, or adds its files to those that are there; an empty one is removed."""
    if not any(folder.iterdir()):
        folder.rmdir()
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.rename(destination)
    except OSError:  # it is on another disk, or the destination has files
        shutil.copytree(folder, destination, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _entries(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place) / name for name in (*folders, *files))


def _remove_stale(place: Path) -> None:
    """Removes what killed processes of this user left behind."""
    for root in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            known = root.lstat()
            if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.geteuid() or time.time() - known.st_mtime < YOUNG_S:
                continue
            with FileLock(root / LOCK, create=False) as lock:
                if lock.try_acquire():
                    shutil.rmtree(root, ignore_errors=True)
