"""A model on disk: config, safetensors weights, tokenizer and chat template in one folder, as Hugging Face tools lay it out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

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


def flaw(folder: Path) -> str | None:
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
