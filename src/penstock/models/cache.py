"""The model cache: model folders in the Hugging Face layout, checked when they are found and stored atomically."""

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
from penstock.system.files import FileLock, sync, sync_tree

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""In place of weights: a LoRA adapter, whose config names the base."""

MANIFEST = "penstock.json"
"""A file in the model folder: its name, and its recipe. If the recipe has changed, the model is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A complete model on disk; `folder_problem` returned None for it."""

    name: str
    path: Path

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


class PullProgress(Protocol):
    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        """`stage` is a short phrase that names the current stage. `total` is None if the amount of work is unknown."""
        ...


def find(key: str, recipe: str) -> ModelFolder | None:
    """The model stored as `key`, if it is complete and of this recipe. Reads only a few small files."""
    path = _models_folder() / key
    manifest = _read_manifest(path)
    if manifest is None or manifest.get("recipe") != recipe or folder_problem(path):
        return None
    return ModelFolder(name=manifest["name"], path=path)


def list_cached() -> list[ModelFolder]:
    """All models in the cache, sorted by name."""
    folders = [path for path in _models_folder().glob("[!.]*") if not folder_problem(path)] if _models_folder().is_dir() else []
    named = [ModelFolder(name=manifest["name"], path=path) for path in folders if (manifest := _read_manifest(path))]
    return sorted(named, key=lambda model: model.name)


def store(
    key: str, *, name: str, recipe: str, make: Callable[[Path], None], space_bytes: int, progress: PullProgress
) -> ModelFolder:
    """Let `make` fill an empty folder, and store it as `key`; if it raises, or is killed, nothing is stored.

    `space_bytes` must be free on the disk. If another process is making the same model, wait for it and return its result.
    """
    with _storage_errors(name), _lock(key, name, progress):
        if found := find(key, recipe):
            return found
        _check_space(name, space_bytes)
        with _staging_folder(key) as folder:
            make(folder)
            if problem := folder_problem(folder):
                raise ModelError(f"{name} {problem}")
            (folder / MANIFEST).write_bytes(orjson.dumps({"name": name, "recipe": recipe}))
            progress(f"keeping {name}")
            _publish(folder, _models_folder() / key)
    return ModelFolder(name=name, path=_models_folder() / key)


@contextmanager
def _lock(key: str, name: str, progress: PullProgress) -> Generator[None]:
    path = _models_folder() / ".locks" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path) as lock:
        if not lock.try_acquire():
            progress(f"waiting for another pull of {name}")
            lock.acquire()
        yield


@contextmanager
def _staging_folder(key: str) -> Generator[Path]:
    """A temporary, empty folder on the cache's disk. The caller holds the lock: anything there is from a killed pull."""
    parent = _models_folder() / ".making" / key
    shutil.rmtree(parent, ignore_errors=True)
    folder = parent / uuid.uuid4().hex
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    """Sync the files before the rename, so that no crash leaves a broken model. An old model goes with the staging folder."""
    for file in folder.iterdir():
        if not file.is_symlink():
            shutil.copymode(folder / MANIFEST, file)  # some writers make private files, but the cache may be shared
    sync_tree(folder)
    if target.exists():
        target.rename(folder.with_name("replaced"))
    folder.rename(target)
    sync(target.parent)


def _check_space(name: str, space_bytes: int) -> None:
    free = shutil.disk_usage(_models_folder()).free
    if free < space_bytes:
        raise ModelError(
            f"{name} needs {_mb(space_bytes)} in {_models_folder()}, {_mb(free)} are free; free some, or set PENSTOCK_CACHE"
        )


@contextmanager
def _storage_errors(name: str) -> Generator[None]:
    try:
        yield
    except OSError as cause:
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = (
            f"the disk of {_models_folder()} is full"
            if full
            else f"{cause.filename or _models_folder()}: {cause.strerror or cause}"
        )
        raise ModelError(f"{name} cannot be kept: {reason}; free some space, or set PENSTOCK_CACHE to another folder") from cause


def _models_folder() -> Path:
    return cache_folder() / "models"


def _read_manifest(path: Path) -> dict[str, Any] | None:
    try:
        return orjson.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


# Is a folder a model?


def folder_problem(folder: Path) -> str | None:
    """Why `folder` is not a usable model, as the end of a sentence about it; None if it is one."""
    try:
        return _find_problem(folder)
    except (OSError, ValueError, LookupError, AttributeError) as cause:
        return f"cannot be read as a model: {cause}; restore its files, or use another one"


def _find_problem(folder: Path) -> str | None:
    if policies := sorted(file.parent.name for file in folder.glob("*/adapter_config.json")):
        return (
            f"holds the adapters of several policies; name one of them ({', '.join(policies)}), or evaluate all with [policies.*]"
        )
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
    if index.is_file():
        return sorted(set(_read_json(index)["weight_map"].values()))
    return [ADAPTER if (folder / ADAPTER).is_file() and not (folder / WEIGHTS).is_file() else WEIGHTS]


def _other_weights(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return ": give the path of its .gguf file instead"
    if any(folder.glob("*.bin")):
        return ": its weights are pickles, which penstock does not load; save them as safetensors first"
    return ""


def _has_chat_template(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or bool(settings.is_file() and _read_json(settings).get("chat_template"))


def _read_json(file: Path) -> dict[str, Any]:
    return orjson.loads(file.read_bytes())
