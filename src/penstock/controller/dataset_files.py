"""The files of datasets: uploads as they come in, and content by its digest.

<sha256>.<ext>           content, never changed and never removed: runs refer to it
.<key>.<sha256>.<ext>    a whole file that was uploaded and not yet looked at
.<key>.<random>.part     a file that is coming in
"""

import asyncio
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncGenerator, AsyncIterable, Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol

from penstock.errors import ControllerError

BLOCK = 1 << 20
"""Bytes that are written at once."""


class Expected(Protocol):
    """What a file is to be."""

    @property
    def key(self) -> str:
        """Of its upload alone."""
        ...

    @property
    def extension(self) -> str:
        """Without a dot."""
        ...

    @property
    def size(self) -> int:
        """In bytes."""
        ...


class DatasetFiles:
    """One folder of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def content(self, digest: str, extension: str) -> Path:
        """Where the file of this digest is, or would be, kept."""
        return self._folder / f"{digest}.{extension}"

    def draft(self, upload: Expected, digest: str) -> Path:
        """Where a whole upload waits to be looked at."""
        return self._folder / f".{upload.key}.{digest}.{upload.extension}"

    def find(self, upload: Expected, digest: str) -> Path | None:
        """An upload's file: waiting, or already in its place; None where it is gone."""
        places = (self.draft(upload, digest), self.content(digest, upload.extension))
        return next((place for place in places if place.exists()), None)

    async def receive(self, upload: Expected, stream: AsyncIterable[bytes]) -> str:
        """Write a file as it comes and have it wait as a draft; its digest. Nothing stays of one of another size."""
        part = self._part(upload)
        with _gone(part), _disk():
            with part.open("xb", buffering=0) as file:
                digest = await _write(file, _crossing(stream), upload.size)
                await asyncio.to_thread(os.fsync, file.fileno())
            part.replace(self.draft(upload, digest))
        return digest

    def copy(self, upload: Expected, source: Path) -> str:
        """Have a copy of a file of this machine wait as a draft; its digest."""
        part = self._part(upload)
        with _gone(part), _disk():
            shutil.copyfile(source, part)
            digest = digest_of(part)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(self.draft(upload, digest))
        return digest

    def keep(self, upload: Expected, digest: str) -> None:
        """Put a draft in its place for good; one that is there already is left."""
        draft, content = self.draft(upload, digest), self.content(digest, upload.extension)
        with _disk():
            if draft.exists():
                draft.replace(content)
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def discard(self, key: str) -> None:
        """Remove what waits of an upload."""
        for file in self._folder.glob(f".{key}.*"):
            file.unlink(missing_ok=True)

    def sweep(self, wanted: set[Path]) -> None:
        """Remove what a killed process left, but for drafts that can still be completed."""
        for file in self._folder.glob(".*"):
            if file not in wanted:
                file.unlink(missing_ok=True)

    def _part(self, upload: Expected) -> Path:
        return self._folder / f".{upload.key}.{secrets.token_hex(4)}.part"


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _write(file: FileIO, stream: AsyncIterable[bytes], wanted: int) -> str:
    digest, size, block = hashlib.sha256(), 0, bytearray()

    def flush() -> None:
        digest.update(block)
        written = 0
        while written < len(block):
            written += file.write(block[written:]) or 0
        block.clear()

    async for piece in stream:
        size += len(piece)
        if size > wanted:
            break
        block += piece
        if len(block) >= BLOCK:
            await asyncio.to_thread(flush)
    if size != wanted:
        told = f"{size} came" if size < wanted else "more came"
        text = f"the file was to have {wanted} bytes, and {told}; upload it again as it is now"
        raise ControllerError(text, code="SIZE_MISMATCH", status=400)
    await asyncio.to_thread(flush)
    return digest.hexdigest()


async def _crossing(stream: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """What a caller sends; that it broke off is no fault of the disk."""
    try:
        async for piece in stream:
            yield piece
    except OSError as cause:
        raise ControllerError("the upload broke off; send the file again", code="UPLOAD_BROKEN", status=400) from cause


@contextmanager
def _gone(part: Path) -> Generator[None]:
    try:
        yield
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _disk() -> Generator[None]:
    """A disk that refuses, told once."""
    try:
        yield
    except OSError as cause:
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        text = f"the file cannot be kept by the controller: {cause.strerror or cause}; free disk space there"
        raise ControllerError(text, code="DISK_FULL" if full else "STORE_FAILED", status=507) from cause
