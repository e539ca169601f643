"""An archive that somebody sent, unpacked: files, folders and links inside it, and nothing anywhere else."""

import io
import shutil
import tarfile
import zlib
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import cast

from penstock.errors import ControllerError

MEMBERS = 100_000
"""Files and folders of one archive."""
_SPARE = 64 * 1024 * 1024
"""What headers and padding may add to the files' own size."""


def unpack(archive: Path, into: Path, *, limit_mb: int = 256) -> None:
    """Unpack a tar.gz into the folder `into`, which must not exist yet; ControllerError 400 SNAPSHOT_INVALID leaves nothing there.

    Refused are absolute paths, `..`, links that leave, anything but files, folders and symbolic links, a name that comes twice, and
    more than `limit_mb` unpacked.
    """
    into.mkdir()
    try:
        with archive.open("rb") as packed, GzipFile(fileobj=packed) as plain:
            counted = _Counted(cast("io.BufferedIOBase", plain), limit_mb * 1_000_000 + _SPARE)
            with tarfile.open(fileobj=counted, mode="r|") as tar:
                _extract(tar, into.resolve(), limit_mb)
    except (tarfile.TarError, EOFError, BadGzipFile, zlib.error, UnicodeError) as cause:
        shutil.rmtree(into)
        raise _refused(f"it is no whole tar.gz: {cause}") from cause
    except BaseException:
        shutil.rmtree(into)
        raise


def _extract(tar: tarfile.TarFile, root: Path, limit_mb: int) -> None:
    links: list[Path] = []
    size = 0
    for number, member in enumerate(tar):
        size += member.size
        if number >= MEMBERS or size > limit_mb * 1_000_000:
            raise _refused(f"it unpacks to more than {limit_mb} MB or {MEMBERS} files")
        place = _place(member.name, root)
        if place == root:
            continue
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if member.isdir():
                place.mkdir(exist_ok=True)
            elif member.isreg():
                _write(tar, member, place)
            elif member.issym():
                place.symlink_to(member.linkname)
                links.append(place)
            else:
                raise _refused(f"{member.name!r} is neither a file, a folder nor a symbolic link")
        except (FileExistsError, NotADirectoryError) as cause:
            raise _refused(f"{member.name!r} is in it twice") from cause
        except ValueError as cause:
            raise _refused(f"{member.name!r} is no name of a file") from cause
    for link in links:
        if not _leads_inside(link, root):
            raise _refused(f"{link.relative_to(root)} is a link that leaves it")


def _place(name: str, root: Path) -> Path:
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _refused(f"{name!r} leads out of it")
    place = root.joinpath(*parts)
    if not place.parent.resolve().is_relative_to(root) or place.parent.resolve() != place.parent:
        raise _refused(f"{name!r} lies behind a link")
    return place


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None, "it is a file"
    with place.open("xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    place.chmod(0o755 if member.mode & 0o100 else 0o644)


def _leads_inside(link: Path, root: Path) -> bool:
    try:
        return not link.readlink().is_absolute() and link.resolve().is_relative_to(root)
    except (RuntimeError, OSError):  # a circle
        return False


def _refused(why: str) -> ControllerError:
    return ControllerError(f"the snapshot cannot be used: {why}", code="SNAPSHOT_INVALID", status=400)


class _Counted(io.RawIOBase):
    """A stream that gives no more than `limit` bytes: a small archive may unpack to anything."""

    def __init__(self, inner: io.BufferedIOBase, limit: int) -> None:
        self._inner = inner
        self._left = limit

    def read(self, size: int = -1, /) -> bytes:
        """See `io.RawIOBase`."""
        found = self._inner.read(size)
        self._left -= len(found)
        if self._left < 0:
            raise _refused("it unpacks to too much")
        return found
