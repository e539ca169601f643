"""File locks between processes: exclusive or shared, waited for or not."""

import asyncio
import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

POLL_S = 0.02
"""How often a waiting process tries again: the kernel wakes nobody who waits with a deadline."""


class FileLock:
    """A flock on a file, which is created where there is none.

    The lock ends with `close`, and with the last process that has the descriptor: no process can die and leave it held.
    The file stays: removing it would let two processes hold locks on two files of one name.
    """

    def __init__(self, path: Path, *, mode: int = 0o666, create: bool = True) -> None:
        self.descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    def acquire(self, *, shared: bool = False) -> None:
        """Block, however long it takes."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def try_acquire(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        """Block until the lock is acquired; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    async def wait_async(self, timeout_s: float) -> bool:
        """`wait`, without blocking the event loop."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def write_holder(self) -> None:
        """Write this process's id into the file, for `lock_holder` to read."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)


@contextmanager
def exclusive_lock(path: Path, refusal: Exception) -> Generator[None]:
    """Hold the lock for the block; raises `refusal` if another process holds it."""
    with FileLock(path) as lock:
        if not lock.try_acquire():
            raise refusal
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock; also True for a file that this process may not open."""
    try:
        with FileLock(path, create=False) as lock:
            return not lock.try_acquire()
    except OSError:
        return path.exists()


def lock_holder(path: Path) -> int | None:
    """The id of the process that holds the lock; 0 if it has not written its id yet, None if nobody holds it."""
    try:
        with FileLock(path, create=False) as lock:
            return None if lock.try_acquire() else int(os.pread(lock.descriptor, 32, 0) or b"0")
    except FileNotFoundError:
        return None


def lock_is_held(path: Path) -> bool | None:
    """Whether a process holds the lock, without taking it for a moment as `is_locked` does; None where the system does not tell."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    name = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    try:
        return any(name in line.split() for line in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return None
