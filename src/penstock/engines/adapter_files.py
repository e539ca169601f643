"""LoRA adapters on disk, in PEFT's format: `adapter_config.json` beside `adapter_model.safetensors`. Needs no torch.

An adapter is of use with its base model only. The config names the base by its path, and the weights file carries its digest.
"""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from penstock.config import LORA_MODULES
from penstock.errors import ModelError
from penstock.system.checksums import file_checksum

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
