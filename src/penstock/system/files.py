"""Atomic writes: a file or folder appears under its name when it is complete, or not at all."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

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
