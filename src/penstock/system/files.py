"""Files that processes share: atomic writes, checksums that tell damage, and locks.

A written file or folder appears under its name when it is complete, or not at all.
"""

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

from penstock.errors import ConfigError

KEY_BYTES = 32
"""Length of a key file's random content, and the least that `load_key` accepts."""


def write_file(path: Path, content: bytes, *, private: bool = False, durable: bool = True) -> Path:
    """Replace `path`: after a kill it has the old content or the new one. Returns `path`.

    `private` makes it readable by the owner only. `durable=False` skips fsync, for files that need not survive a power cut.
    """
    with _draft(path) as draft:
        _create(draft, content, private=private)
        if durable:
            publish(draft, path)
        else:
            draft.replace(path)
    return path


def create_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, unless `path` exists: the first of several processes wins."""
    with _draft(path) as draft:
        _create(draft, content, private=True)
        sync(draft)
        with suppress(FileExistsError):
            os.link(draft, path)  # unlike rename, link never replaces a file
    _sync_names(path.parent)


def load_key(path: Path, *, loss: str, text: bool = False) -> bytes:
    """Return the key in the file `path`. The first call creates it, readable by its owner only.

    It is made of random bytes, or with `text` of URL-safe letters, and is on disk before anyone sees it. A file that is empty, cut
    short or all zeros is refused, `loss` says in the error what is lost if the file is removed.
    """
    try:
        if not path.exists():
            create_private(path, secrets.token_urlsafe(KEY_BYTES).encode() if text else secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
    except OSError as cause:
        raise ConfigError(f"{path}: the key cannot be read: {cause.strerror or cause}; it must be a file of its owner's") from cause
    problem, remedy = f"{path} is damaged", f"put it back from a backup, or remove it and {loss}"
    check_key(key, problem, remedy)
    if text and not key.isascii():
        raise ConfigError(f"{problem}: it holds bytes that no key of ours has; {remedy}")
    return key


def check_key(key: bytes, problem: str, remedy: str) -> None:
    """Raise ConfigError unless `key` is long enough to be a secret."""
    if len(key) < KEY_BYTES or not any(key):
        what = f"{len(key)} bytes" if len(key) < KEY_BYTES else "nothing but zeros"
        raise ConfigError(f"{problem}: it holds {what}, a key at least {KEY_BYTES} random bytes; {remedy}")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yields a draft path in the folder of `path` for the caller to write; a file written there replaces `path` at the end."""
    with _draft(path) as draft:
        yield draft
        publish(draft, path)


@contextmanager
def creating(path: Path) -> Generator[Path]:
    """Like `replacing`, for a file or a flat folder that a user asked for with --out: an existing `path` is never replaced."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already; give another path with --out, or move it away")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _draft(path) as draft:
            yield draft
            if os.path.lexists(path):
                raise ConfigError(f"{path} came to be meanwhile; give another path with --out, or move it away")
            publish(draft, path)
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be written: {cause.strerror or cause}; choose another place with --out") from cause


def open_inside(folder: Path, path: Path) -> BinaryIO:
    """Open a file below `folder` for reading; OSError if it or a folder on the way is a link, or if it is no regular file.

    For a folder that others write to, who might put a link to our files there, even while we look.
    """
    parts = path.relative_to(folder).parts
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, part in enumerate(parts, 1):
            if part == "..":
                raise OSError(errno.EINVAL, "leads out of its folder", str(path))
            kind = os.O_DIRECTORY if number < len(parts) else os.O_NONBLOCK  # a pipe would block
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_inside(folder: Path, path: Path) -> bytes:
    """Read a whole file; see `open_inside`."""
    with open_inside(folder, path) as file:
        return file.read()


def publish(draft: Path, path: Path) -> None:
    """Rename a complete file or flat folder to `path`, durably.

    The content is synced before the rename, or a power cut could leave the name with an empty file. The folder is synced after it,
    or the name itself could be lost.
    """
    sync_tree(draft)
    draft.replace(path)
    _sync_names(path.parent)


def sync_tree(path: Path) -> None:
    """Sync a file, or the files of a folder and then the folder."""
    for each in [*path.iterdir(), path] if path.is_dir() else [path]:
        if not each.is_symlink():
            sync(each)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(folder: Path) -> None:
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise


@contextmanager
def _draft(path: Path) -> Generator[Path]:
    """A path in the folder of `path`, so that the rename stays on one disk. Random: two processes may write the same file."""
    draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.part")
    try:
        yield draft
    finally:
        with suppress(OSError):  # an error here would hide the one that is being raised
            if draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                draft.unlink(missing_ok=True)


def _create(path: Path, content: bytes, *, private: bool) -> None:
    # The mode is given when the file is made: a chmod afterwards would leave a moment in which others can open it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with os.fdopen(descriptor, "wb") as out:
        out.write(content)


_ENTRY = re.compile(rb',"checksum":"([0-9a-f]{16})"\}\n?$')


def file_checksum(path: Path) -> str:
    """SHA-256, in hexadecimal as `sha256sum` prints it. Threads run it in parallel."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def add_checksum(text: bytes, key: str = "") -> bytes:
    """Add a last entry `checksum` to a JSON object that is not empty; with another `key` it would be another one."""
    head = text.rstrip()[:-1]
    return b'%b,"checksum":"%b"}' % (head, _checksum(head, key))


def remove_checksum(text: bytes, key: str = "") -> bytes:
    """Undo `add_checksum`; ValueError if the checksum does not match. Text without one is returned as it is."""
    found = _ENTRY.search(text)
    if found is None:
        return text
    head = text[: found.start()]
    if found[1] != _checksum(head, key):
        raise ValueError("it does not match its checksum")
    return head + b"}"


def _checksum(head: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + head).hexdigest()[:16].encode()


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
