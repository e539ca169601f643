"""Models kept on disk: each is made in a folder of its own, checked, synced and renamed into place, by one process at a time.

models/NAME/            whole, always: it appears by one rename
models/.making/NAME/    what a pull is working on; what a killed one left is swept by the next
models/.locks/NAME      held while NAME is being made
"""

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import orjson

from penstock.config import cache_folder
from penstock.errors import ModelError
from penstock.models.folder import ModelFolder, flaw

MANIFEST = "penstock.json"
"""Beside the model: its name, and the recipe that it was made by. A model of another recipe is made again."""


class Progress(Protocol):
    """Hears how a pull goes."""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        """`stage` is a short phrase; a new one begins a new stage. `total` None: nobody knows how long it takes."""
        ...


def find(key: str, recipe: str) -> ModelFolder | None:
    """The model kept as `key`, if it is there, whole, and of this recipe. Reads a few small files only."""
    path = _models() / key
    manifest = _manifest(path)
    if manifest is None or manifest.get("recipe") != recipe or flaw(path):
        return None
    return ModelFolder(name=manifest["name"], path=path)


def keep(key: str, *, name: str, recipe: str, make: Callable[[Path], None], space_bytes: int, progress: Progress) -> ModelFolder:
    """Have `make` fill an empty folder, and keep that as `key`; if it raises, or is killed, nothing is kept.

    `space_bytes` must be free on the disk. Where another process makes the same model, wait for it and take what it made.
    """
    with _storage_errors(name), _lock(key, name, progress):
        if found := find(key, recipe):
            return found
        _check_space(name, space_bytes)
        with _workplace(key) as folder:
            make(folder)
            if wrong := flaw(folder):
                raise ModelError(f"{name} {wrong}")
            (folder / MANIFEST).write_bytes(orjson.dumps({"name": name, "recipe": recipe}))
            progress(f"keeping {name}")
            _publish(folder, _models() / key)
    return ModelFolder(name=name, path=_models() / key)


def kept() -> list[ModelFolder]:
    """All models in the cache, by name."""
    folders = [path for path in _models().glob("[!.]*") if not flaw(path)] if _models().is_dir() else []
    named = [ModelFolder(name=manifest["name"], path=path) for path in folders if (manifest := _manifest(path))]
    return sorted(named, key=lambda model: model.name)


def _models() -> Path:
    return cache_folder() / "models"


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        return orjson.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None


@contextmanager
def _lock(key: str, name: str, progress: Progress) -> Generator[None]:
    """The lock dies with its process; its file stays, since removing it would let two processes hold two locks."""
    path = _models() / ".locks" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another pull of {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _workplace(key: str) -> Generator[Path]:
    """An empty folder on the cache's disk, gone afterwards; holds the lock's owner only, so what lies there is a dead pull's."""
    place = _models() / ".making" / key
    shutil.rmtree(place, ignore_errors=True)
    folder = place / uuid.uuid4().hex
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    """Sync every file, then show the folder under its name; what was there before is removed with the workplace."""
    for file in folder.iterdir():
        if not file.is_symlink():
            shutil.copymode(folder / MANIFEST, file)  # some writers make private files; a cache may be shared
            sync(file)
    sync(folder)
    if target.exists():
        target.rename(folder.with_name("replaced"))
    folder.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_space(name: str, space_bytes: int) -> None:
    free = shutil.disk_usage(_models()).free
    if free < space_bytes:
        raise ModelError(f"{name} needs {_mb(space_bytes)} in {_models()}, {_mb(free)} are free; free some, or set PENSTOCK_CACHE")


@contextmanager
def _storage_errors(name: str) -> Generator[None]:
    try:
        yield
    except OSError as cause:
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"the disk of {_models()} is full" if full else f"{cause.filename or _models()}: {cause.strerror or cause}"
        raise ModelError(f"{name} cannot be kept: {what}; free some space, or set PENSTOCK_CACHE to another folder") from cause


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
