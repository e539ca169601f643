"""Checks of a published model folder before a server is told to read it: a damaged or different one may crash the server."""

import asyncio
import struct
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.errors import EngineError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
OPTIONAL_TENSORS = ("lm_head.weight", "rotary_emb.inv_freq")
"""Name endings of tensors that some tools save and others leave out, because they can be derived."""

Shapes = dict[str, tuple[int, ...]]


class PublishedWeights(NamedTuple):
    """Weights that servers should hold."""

    version: int
    folder: Path
    """Absolute; servers open it under the same path."""
    label: str
    """The label that a server reports while it holds them."""
    written: asyncio.Event | None = None
    """Set once the folder is complete, for weights that were sent in another way first; None if it was from the start."""


class ModelContents(NamedTuple):
    shapes: Shapes
    config: dict[str, Any]
    vocabulary: int


def check_same_shape(folder: Path, start: Path, context_length: int) -> ModelContents:
    """Read `folder`; EngineError if it is incomplete, has other tensors than `start`, or a shorter context than is served."""
    shapes = read_shapes(folder)
    try:
        config = _read_json(folder / "config.json")
    except (OSError, ValueError) as cause:
        raise EngineError(f"{folder} has no config.json that can be read: {cause}") from cause
    _compare(shapes, read_shapes(start), folder)
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and context_length > longest:
        raise EngineError(f"the servers have a context of {context_length} tokens, the model in {folder} one of {longest}")
    return ModelContents(shapes, config, read_vocabulary(folder))


def read_vocabulary(folder: Path) -> int:
    """The number of token ids that the model in `folder` knows, by its config, else by its tokenizer; 0 if neither says."""
    try:
        config = _read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        if size is None:
            tokenizer = _read_json(folder / "tokenizer.json")
            ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer.get("added_tokens", []))]
            size = max(ids, default=-1) + 1
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return 0
    return size if isinstance(size, int) and size > 0 else 0


def read_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor in the folder's safetensors files; EngineError if a file is incomplete."""
    try:
        shards = sorted(set(_read_json(folder / INDEX)["weight_map"].values())) if (folder / INDEX).exists() else [WEIGHTS]
        shapes: Shapes = {}
        for shard in shards:
            shapes |= _read_header(folder / shard)
        return shapes
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as cause:
        raise EngineError(f"{folder} does not hold whole weights: {cause}") from cause


def _read_header(file: Path) -> Shapes:
    with file.open("rb") as weights:
        (length,) = struct.unpack("<Q", weights.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} has no header")
        header: dict[str, Any] = orjson.loads(weights.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if file.stat().st_size != end:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes in place of {end}")
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}


def _compare(shapes: Shapes, served: Shapes, folder: Path) -> None:
    unmatched = sorted(name for name in shapes.keys() ^ served.keys() if not name.endswith(OPTIONAL_TENSORS))
    different = sorted(name for name in shapes.keys() & served.keys() if shapes[name] != served[name])
    if unmatched or different:
        name = (unmatched or different)[0]
        text = f"{name} is {_shape_text(shapes, name)}, served is {_shape_text(served, name)}"
        raise EngineError(f"{folder} holds a model of another shape: {text}")


def _shape_text(shapes: Shapes, name: str) -> str:
    return "x".join(map(str, shapes[name])) if name in shapes else "not there"


def _read_json(file: Path) -> dict[str, Any]:
    return orjson.loads(file.read_bytes())
