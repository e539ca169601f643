"""Checkpoints and LoRA adapters on disk, with their checksums. Needs no torch.

`state.json` marks a model folder as a checkpoint: it names every other file, and carries its own checksum. Adapters are in PEFT's
format: `adapter_config.json` next to `adapter_model.safetensors`. The config names the base model by its path, and the weights file
carries the base model's digest.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from penstock.codec import from_json, to_json
from penstock.config import LORA_MODULES
from penstock.errors import ModelError
from penstock.records import PolicyVersion
from penstock.system.files import add_checksum, file_checksum, remove_checksum

OPTIMIZER, STATE = "optimizer.state", "state.json"
"""Files that only the trainer reads. The first has no .safetensors suffix, because other programs load such files as weights."""
OLD_OPTIMIZER = "optimizer.safetensors"
"""The optimizer's file in older checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    version: PolicyVersion
    files: dict[str, int]
    """Name and size in bytes of every other file."""
    python_random: tuple[int, ...]
    python_gauss: float | None
    torch_random: str
    """Hexadecimal, as is `cuda_random`."""
    cuda_random: str | None
    sha256: dict[str, str] = field(default_factory=dict[str, str])
    """Name and checksum of every other file; empty in older checkpoints."""
    run: str = ""
    """The id of its run; empty in older checkpoints."""


def read_state(folder: Path) -> CheckpointState:
    """ValueError or OSError if `state.json` is missing or damaged."""
    return from_json(CheckpointState, remove_checksum((folder / STATE).read_bytes()))


def encode_state(state: CheckpointState) -> bytes:
    return add_checksum(to_json(state))


def is_complete(folder: Path) -> bool:
    """Whether every file is there in its size: quick, but blind to changed bytes."""
    try:
        return _find_missing(folder, read_state(folder)) is None
    except (OSError, ValueError):
        return False


def find_damage(folder: Path, *, run: str | None = None, skip: Collection[str] = ()) -> str | None:
    """Read every file but those in `skip`; returns what is wrong, also that it is not of `run`, or None."""
    try:
        state = read_state(folder)
        if run is not None and state.run != run:
            return "it belongs to another run"
        if problem := _find_missing(folder, state):
            return problem
        for name, checksum in state.sha256.items():
            if name not in skip and file_checksum(folder / name) != checksum:
                return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{STATE} is missing"
    except (OSError, ValueError) as cause:
        return f"{STATE} cannot be read: {cause}"
    return None


def refuse_damaged_weights(folder: Path) -> None:
    """ModelError if the model folder is a checkpoint, or a policy's part of one, with damaged files, the optimizer's aside."""
    if is_adapter(folder) and not _is_checkpoint(folder):
        folder = folder.parent
    if _is_checkpoint(folder) and (problem := find_damage(folder, run=_run_around(folder), skip=(OPTIMIZER, OLD_OPTIMIZER))):
        raise ModelError(f"checkpoint {folder} is damaged: {problem}; use another one, or restore a copy")


def find_adapter(path: Path) -> Path:
    """The adapter in `path`: a checkpoint, a folder of PEFT's, or a run, whose newest checkpoint it is. ModelError if none."""
    numbered = [folder for folder in (path / "checkpoints").glob("*") if folder.name.isdecimal() and is_complete(folder)]
    found = max(numbered, key=lambda folder: int(folder.name), default=path)
    if not is_adapter(found):
        several = [folder for folder in sorted(found.glob("*")) if is_adapter(folder)] if found.is_dir() else []
        one = (
            f"it holds those of several policies; name one, such as {several[0]}" if several else "give a run or checkpoint of LoRA"
        )
        raise ModelError(f"{found} is no LoRA adapter; {one}")
    refuse_damaged_weights(found)
    return found


def _run_around(folder: Path) -> str | None:
    """The id of the run in whose folder the checkpoint is; None if it was copied elsewhere, or the run is an older one."""
    try:
        return orjson.loads((folder.parent.parent / "config.json").read_bytes())["id"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _is_checkpoint(folder: Path) -> bool:
    """False also for a model whose `state.json` is another program's."""
    try:
        content: Any = orjson.loads((folder / STATE).read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return isinstance(content, dict) and any(name in content for name in ("version", "files", "torch_random"))


def _find_missing(folder: Path, state: CheckpointState) -> str | None:
    for name, size in state.files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if (found := file.stat().st_size) != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
    return None


# Adapters

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNSUPPORTED = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "layers_to_transform",
)  # fmt: skip
"""Settings of PEFT that change what an adapter adds; `bias` is another."""
BASE_DIGEST = "base_sha256"
"""Entry of the weights file's metadata."""


class AdapterConfig(NamedTuple):
    rank: int
    alpha: float
    """What the adapter adds is multiplied by alpha / rank."""
    target_modules: tuple[str, ...]
    base: Path
    """The folder of the model that it adds to."""
    base_digest: str = ""
    """See `model_digest`; empty in the adapters of other programs."""


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter instead of a model's weights."""
    return (folder / ADAPTER_CONFIG).is_file() and not _weight_files(folder)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """ModelError if it cannot be read, or asks for something that would be ignored."""
    file = folder / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = orjson.loads(file.read_bytes())
        targets: list[str] | str = config["target_modules"]
        wanted = LORA_MODULES if targets == "all-linear" else tuple(sorted(targets, key=_order))
        found = AdapterConfig(int(config["r"]), float(config["lora_alpha"]), wanted, Path(config["base_model_name_or_path"]))
        digest = _metadata(folder / ADAPTER_WEIGHTS).get(BASE_DIGEST, "")
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise ModelError(f"{file}: no adapter that can be read ({type(cause).__name__}: {cause}); restore a copy") from cause
    if unknown := [name for name in wanted if name not in LORA_MODULES]:
        raise ModelError(f"{file}: adds to {unknown[0]!r}; adapters of {', '.join(LORA_MODULES)} are supported")
    if used := [key for key in UNSUPPORTED if config.get(key)] + (["bias"] if config.get("bias", "none") != "none" else []):
        raise ModelError(f"{file}: {used[0]} is not supported; give a plain LoRA adapter")
    return found._replace(base_digest=digest)


def write_adapter_config(folder: Path, config: AdapterConfig) -> None:
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / ADAPTER_CONFIG).write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))


def find_base(folder: Path, base: Path | None = None) -> Path:
    """Returns the folder of an adapter's base model, or checks `base`; ModelError if it is not there, or another model."""
    config = read_adapter_config(folder)
    found = base or config.base
    if not found.is_dir():
        raise ModelError(
            f"{folder} is a LoRA adapter of the model in {found}, which is not there; pull that model, or copy it there"
        )
    if config.base_digest and model_digest(found) != config.base_digest:
        raise ModelError(f"{folder} is a LoRA adapter of another model than the one in {found}; restore the one it was trained on")
    return found


def model_digest(folder: Path) -> str:
    """The digest of a model's weights: of the names and checksums of its files."""
    return _digest(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in _weight_files(folder)))


@lru_cache(maxsize=16)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Sizes and times are part of the key, so that a file is read again once it has changed."""
    lines = [f"{file_checksum(file)}  {file.name}\n" for file, _, _ in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with cast(Any, safe_open)(file, framework="numpy") as opened:
            return opened.metadata() or {}
    except SafetensorError as cause:
        raise ValueError(str(cause)) from cause


def _order(name: str) -> tuple[int, str]:
    return (LORA_MODULES.index(name) if name in LORA_MODULES else len(LORA_MODULES), name)
