"""A published model folder, looked at before a server is told to read it: one that reads a damaged file may not survive it."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.errors import EngineError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""Bytes, as safetensors itself allows."""
OPTIONAL_TENSORS = ("lm_head.weight", "rotary_emb.inv_freq")
"""How the names of tensors end that some files repeat and others leave out."""

Shapes = dict[str, tuple[int, ...]]


class PublishedWeights(NamedTuple):
    """Weights that servers are to hold."""

    version: int
    folder: Path
    """Absolute: servers open it under this very path."""
    label: str
    """What a server that holds them calls them."""


class ModelContents(NamedTuple):
    """What a model folder holds."""

    shapes: Shapes
    config: dict[str, Any]


def read_contents(folder: Path) -> ModelContents:
    """EngineError where the folder is not whole."""
    try:
        return ModelContents(read_shapes(folder), _json(folder / "config.json"))
    except (OSError, ValueError) as cause:
        raise EngineError(f"{folder} has no config.json that can be read: {cause}") from cause


def read_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor in a folder's safetensors files; EngineError where one is not whole."""
    try:
        shards = sorted(set(_json(folder / INDEX)["weight_map"].values())) if (folder / INDEX).exists() else [WEIGHTS]
        shapes: Shapes = {}
        for shard in shards:
            shapes |= _read_header(folder / shard)
        return shapes
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as cause:
        raise EngineError(f"{folder} does not hold whole weights: {cause}") from cause


def check_same_shape(folder: Path, start: Path, context_length: int) -> ModelContents:
    """What `folder` holds; EngineError where that is not whole, or not of the model in `start`, served with this context."""
    found = read_contents(folder)
    _compare(found.shapes, read_shapes(start), folder)
    longest = found.config.get("max_position_embeddings")
    if isinstance(longest, int) and context_length > longest:
        raise EngineError(f"the servers have a context of {context_length} tokens, the model in {folder} one of {longest}")
    return found


def _compare(shapes: Shapes, like: Shapes, folder: Path) -> None:
    strange = sorted(name for name in shapes.keys() ^ like.keys() if not name.endswith(OPTIONAL_TENSORS))
    other = sorted(name for name in shapes.keys() & like.keys() if shapes[name] != like[name])
    if strange or other:
        name = (strange or other)[0]
        raise EngineError(f"{folder} holds a model of another shape: {name} is {_say(shapes, name)}, served is {_say(like, name)}")


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


def _json(file: Path) -> dict[str, Any]:
    return orjson.loads(file.read_bytes())


def _say(shapes: Shapes, name: str) -> str:
    return "x".join(map(str, shapes[name])) if name in shapes else "not there"
