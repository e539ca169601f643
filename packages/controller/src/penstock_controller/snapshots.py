"""Snapshots of code: reproducible tar.gz archives of a folder or a commit, and how they are unpacked safely."""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self, cast

from penstock.errors import ConfigError, ControllerError

LIMIT_MB = 256
MAX_MEMBERS = 100_000
"""Limit of files and folders in one archive."""
GIT_TIMEOUT_S = 120.0
_TAR_OVERHEAD_BYTES = 64 * 1024 * 1024
"""Allowance for tar headers and padding beyond the files' sizes."""
_EXCLUDED_NAMES = ("__pycache__", "node_modules", "site-packages")
_EXCLUDED_FOLDERS = ("runs",)
"""Top-level folders that runs write to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An archive in a temporary file; `close`, or the end of `with`, removes it."""

    path: Path
    digest: str
    """SHA-256 of the archive."""
    files: int
    commit_sha: str | None = None
    """HEAD of the folder's repository; None outside of a repository."""
    branch: str | None = None
    dirty: bool = False
    """Whether the files differ from the commit."""

    def close(self) -> None:
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# Packing.


def make_snapshot(folder: Path, *, also: Iterable[Path] = (), limit_mb: int = LIMIT_MB) -> Snapshot:
    """Packs a folder as it is now; ConfigError if it is too large or has a link that leads outside.

    In a git repository, packs tracked and untracked files that are not ignored; elsewhere everything except hidden files, caches
    and virtual environments. runs/ is left out. `also` are files under the folder that are packed even if git ignores them.
    """
    root = folder.resolve()
    named = {file.resolve().relative_to(root) for file in also}
    listed = sorted({*(_git_files(root) or _walk_files(root)), *named}, key=str)
    present = [path for path in listed if (root / path).is_symlink() or (root / path).is_file()]
    _check_size(root, present, limit_mb)
    path, digest = _pack_files(root, present)
    commit = _git(root, "rev-parse", "--verify", "-q", "HEAD")
    return Snapshot(
        path=path,
        digest=digest,
        files=len(present),
        commit_sha=commit.strip() if commit else None,
        branch=(_git(root, "symbolic-ref", "-q", "--short", "HEAD") or "").strip() or None,
        dirty=bool(commit and _git(root, "status", "--porcelain", "--", ".")),
    )


def snapshot_commit(repository: Path, ref: str | None = None) -> Snapshot:
    """Packs a commit, a branch, or HEAD (None) of a repository. Without git, packs the folder's files.

    ControllerError 404 COMMIT_UNKNOWN for an unknown ref.
    """
    revision = ref or "HEAD"
    commit = None if revision.startswith("-") else _git(repository, "rev-parse", "--verify", "-q", f"{revision}^{{commit}}")
    if commit is None and ref is None:
        return make_snapshot(repository)
    if commit is None:
        text = f"{repository} has no commit or branch {revision[:120]!r}; fetch it there, or name another"
        raise ControllerError(text, code="COMMIT_UNKNOWN", status=404)
    tar = _git_bytes(repository, "archive", "--format=tar", commit.strip())
    if tar is None:
        raise ControllerError(f"{repository}: git cannot pack commit {commit.strip()}", code="GIT_FAILED", status=503)
    path, digest = _write_archive([tar])
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        files = sum(1 for member in archive if not member.isdir())
    branch = _git(repository, "rev-parse", "--abbrev-ref", revision) or ""
    known = branch.strip() if branch.strip() not in ("", "HEAD") else None
    return Snapshot(path=path, digest=digest, files=files, commit_sha=commit.strip(), branch=known)


def _git_files(root: Path) -> list[Path]:
    """Returns tracked and untracked files; empty if the folder is in no repository, or ignored by it."""
    tracked = _git(root, "ls-files", "-z", "--cached") or ""
    others = _git(root, "ls-files", "-z", "--others", "--exclude-standard") or ""
    new = [Path(name) for name in others.split("\0") if name]
    return [Path(name) for name in tracked.split("\0") if name] + [path for path in new if not _is_excluded(path)]


def _walk_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        links = [name for name in folders if (root / here / name).is_symlink()]
        folders[:] = [
            name
            for name in sorted(folders)
            if name not in links and not _is_excluded(here / name) and not (root / here / name / "pyvenv.cfg").exists()
        ]
        yield from (here / name for name in [*files, *links] if not _is_excluded(here / name))


def _is_excluded(path: Path) -> bool:
    return (
        any(part.startswith(".") or part in _EXCLUDED_NAMES or part.endswith(".pyc") for part in path.parts)
        or path.parts[0] in _EXCLUDED_FOLDERS
    )


def _check_size(root: Path, paths: list[Path], limit_mb: int) -> None:
    sizes = {path: (root / path).lstat().st_size for path in paths}
    total = sum(sizes.values())
    if total > limit_mb * 1_000_000:
        largest = ", ".join(f"{path} ({sizes[path] / 1e6:.0f} MB)" for path in sorted(paths, key=lambda each: -sizes[each])[:3])
        text = f"{root} has {total / 1e6:.0f} MB of files, and {limit_mb} MB may be submitted; the largest are {largest}"
        raise ConfigError(f"{text}; let git ignore what the run does not need, or upload data with: penstock dataset upload")


def _pack_files(root: Path, paths: list[Path]) -> tuple[Path, str]:
    with tempfile.TemporaryFile() as plain:
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in paths:
                _add_file(archive, root, path)
        plain.seek(0)
        return _write_archive(iter(lambda: plain.read(1 << 20), b""))


def _add_file(archive: tarfile.TarFile, root: Path, path: Path) -> None:
    file = root / path
    entry = tarfile.TarInfo(PurePosixPath(path).as_posix())
    if file.is_symlink():
        if not file.resolve().is_relative_to(root):
            raise ConfigError(f"{file} is a link that leaves {root}; copy what it points to, or let git ignore it")
        entry.type, entry.linkname = tarfile.SYMTYPE, os.path.relpath(file.resolve(), file.parent.resolve())
        archive.addfile(entry)
        return
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return  # deleted since it was listed
    except OSError as cause:
        raise ConfigError(f"{file} cannot be read: {cause.strerror}; correct its permissions, or let git ignore it") from cause
    entry.size, entry.mode = len(content), 0o755 if os.access(file, os.X_OK) else 0o644
    archive.addfile(entry, io.BytesIO(content))


def _write_archive(chunks: Iterable[bytes]) -> tuple[Path, str]:
    """Compresses into a new file; returns its path and SHA-256. No timestamp, so that equal files give an equal SHA-256."""
    descriptor, name = tempfile.mkstemp(prefix="penstock-", suffix=".tar.gz")
    try:
        with (
            os.fdopen(descriptor, "wb") as file,
            gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed,
        ):
            for chunk in chunks:
                packed.write(chunk)
        with Path(name).open("rb") as file:
            return Path(name), hashlib.file_digest(file, "sha256").hexdigest()
    except BaseException:
        Path(name).unlink()
        raise


def _git(folder: Path, *arguments: str) -> str | None:
    output = _git_bytes(folder, *arguments)
    return None if output is None else os.fsdecode(output)


def _git_bytes(folder: Path, *arguments: str) -> bytes | None:
    """Returns git's output; None if it fails or is not installed. Disables fsmonitor: its hook would run the repository's code."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# Unpacking.


def unpack(archive: Path, into: Path, *, limit_mb: int = 256) -> None:
    """Unpacks a tar.gz into the new folder `into`; ControllerError 400 SNAPSHOT_INVALID leaves nothing there.

    Refused are absolute paths, `..`, links that lead outside, special files, repeated names, and more than `limit_mb` unpacked.
    """
    into.mkdir()
    try:
        with archive.open("rb") as packed, GzipFile(fileobj=packed) as plain:
            bounded = _BoundedReader(cast("io.BufferedIOBase", plain), limit_mb * 1_000_000 + _TAR_OVERHEAD_BYTES)
            with tarfile.open(fileobj=bounded, mode="r|") as tar:
                _extract(tar, into.resolve(), limit_mb)
    except (tarfile.TarError, EOFError, BadGzipFile, zlib.error, UnicodeError) as cause:
        shutil.rmtree(into)
        raise _invalid_snapshot(f"it is no whole tar.gz: {cause}") from cause
    except BaseException:
        shutil.rmtree(into)
        raise


def _extract(tar: tarfile.TarFile, root: Path, limit_mb: int) -> None:
    links: list[Path] = []
    size = 0
    for number, member in enumerate(tar):
        size += member.size
        if number >= MAX_MEMBERS or size > limit_mb * 1_000_000:
            raise _invalid_snapshot(f"it unpacks to more than {limit_mb} MB or {MAX_MEMBERS} files")
        path = _member_path(member.name, root)
        if path == root:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.isdir():
                path.mkdir(exist_ok=True)
            elif member.isreg():
                _write_file(tar, member, path)
            elif member.issym():
                path.symlink_to(member.linkname)
                links.append(path)
            else:
                raise _invalid_snapshot(f"{member.name!r} is neither a file, a folder nor a symbolic link")
        except (FileExistsError, NotADirectoryError) as cause:
            raise _invalid_snapshot(f"{member.name!r} is in it twice") from cause
        except ValueError as cause:
            raise _invalid_snapshot(f"{member.name!r} is no name of a file") from cause
    for link in links:  # when all files exist: a link may come before its target
        if not _leads_inside(link, root):
            raise _invalid_snapshot(f"{link.relative_to(root)} is a link that leaves it")


def _member_path(name: str, root: Path) -> Path:
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _invalid_snapshot(f"{name!r} leads out of it")
    path = root.joinpath(*parts)
    if not path.parent.resolve().is_relative_to(root) or path.parent.resolve() != path.parent:
        raise _invalid_snapshot(f"{name!r} lies behind a link")
    return path


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None, "it is a file"
    with path.open("xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _leads_inside(link: Path, root: Path) -> bool:
    try:
        return not link.readlink().is_absolute() and link.resolve().is_relative_to(root)
    except (RuntimeError, OSError):  # a loop of links
        return False


class _BoundedReader(io.RawIOBase):
    """A stream of at most `limit` bytes, against decompression bombs."""

    def __init__(self, inner: io.BufferedIOBase, limit: int) -> None:
        self._inner = inner
        self._left = limit

    def read(self, size: int = -1, /) -> bytes:
        found = self._inner.read(size)
        self._left -= len(found)
        if self._left < 0:
            raise _invalid_snapshot("it unpacks to too much")
        return found


def _invalid_snapshot(why: str) -> ControllerError:
    return ControllerError(f"the snapshot cannot be used: {why}", code="SNAPSHOT_INVALID", status=400)
