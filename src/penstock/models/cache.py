"""A model on disk: config, safetensors weights, tokenizer and chat template in one folder, as Hugging Face tools lay it out."""

import errno
import shutil
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from penstock.config import cache_folder
from penstock.errors import ModelError
from penstock.system.files import sync, sync_tree
from penstock.system.locks import FileLock

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model that can be loaded without a network: `flaw` found nothing to say about its folder."""

    name: str
    path: Path

    @property
    def size_bytes(self) -> int:
        """Of all its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def folder_problem(folder: Path) -> str | None:
    """What keeps `folder` from being a model, as the end of a sentence about it; None where it is whole."""
    try:
        return _flaw(folder)
    except (OSError, ValueError, LookupError, AttributeError) as cause:
        return f"cannot be read as a model: {cause}"


def _flaw(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "has no config.json: it must be a model folder in the Hugging Face layout"
    if missing := [shard for shard in _shards(folder) if not (folder / shard).is_file()]:
        return f"has no {missing[0]}{_other_weights(folder)}"
    if not (folder / "tokenizer.json").is_file():
        return "has no tokenizer.json: save its fast tokenizer there, with transformers' save_pretrained"
    if not _has_chat_template(folder):
        return "has no chat template: it must be an instruct or chat model"
    return None


def _shards(folder: Path) -> list[str]:
    index = folder / INDEX
    return sorted(set(_read(index)["weight_map"].values())) if index.is_file() else [WEIGHTS]


def _other_weights(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return ": give the path of its .gguf file instead"
    if any(folder.glob("*.bin")):
        return ": its weights are pickles, which penstock does not load; save them as safetensors first"
    return ""


def _has_chat_template(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or bool(settings.is_file() and _read(settings).get("chat_template"))


def _read(file: Path) -> dict[str, Any]:
    return orjson.loads(file.read_bytes())


MANIFEST = "penstock.json"
"""Beside the model: its name, and the recipe that it was made by. A model of another recipe is made again."""


class PullProgress(Protocol):
    """Hears how a pull goes."""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        """`stage` is a short phrase; a new one begins a new stage. `total` None: nobody knows how long it takes."""
        ...


def find(key: str, recipe: str) -> ModelFolder | None:
    """The model kept as `key`, if it is there, whole, and of this recipe. Reads a few small files only."""
    path = _models() / key
    manifest = _manifest(path)
    if manifest is None or manifest.get("recipe") != recipe or folder_problem(path):
        return None
    return ModelFolder(name=manifest["name"], path=path)


def store(
    key: str, *, name: str, recipe: str, make: Callable[[Path], None], space_bytes: int, progress: PullProgress
) -> ModelFolder:
    """Have `make` fill an empty folder, and keep that as `key`; if it raises, or is killed, nothing is kept.

    `space_bytes` must be free on the disk. Where another process makes the same model, wait for it and take what it made.
    """
    with _storage_errors(name), _lock(key, name, progress):
        if found := find(key, recipe):
            return found
        _check_space(name, space_bytes)
        with _workplace(key) as folder:
            make(folder)
            if wrong := folder_problem(folder):
                raise ModelError(f"{name} {wrong}")
            (folder / MANIFEST).write_bytes(orjson.dumps({"name": name, "recipe": recipe}))
            progress(f"keeping {name}")
            _publish(folder, _models() / key)
    return ModelFolder(name=name, path=_models() / key)


def list_cached() -> list[ModelFolder]:
    """All models in the cache, by name."""
    folders = [path for path in _models().glob("[!.]*") if not folder_problem(path)] if _models().is_dir() else []
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
def _lock(key: str, name: str, progress: PullProgress) -> Generator[None]:
    path = _models() / ".locks" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path) as lock:
        if not lock.try_acquire():
            progress(f"waiting for another pull of {name}")
            lock.acquire()
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
    sync_tree(folder)
    if target.exists():
        target.rename(folder.with_name("replaced"))
    folder.rename(target)
    sync(target.parent)


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
