"""Decoder weights from and to model folders: safetensors under Hugging Face names."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from penstock.engines.checkpoint_files import ADAPTER_CONFIG, STATE
from penstock.engines.embedded.decoder import Decoder, DecoderShape, read_decoder_shape
from penstock.errors import ModelError
from penstock.system.files import sync_tree

LAYER_NAMES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "out": ("self_attn.o_proj",),
    "down": ("mlp.down_proj",),
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
}
"""Module of our layer → the modules of a Hugging Face layer whose weights it stacks."""

WEIGHTS = "model.safetensors"
MODEL_SUFFIXES = (".jinja", ".json", ".model", ".txt")
"""Files of a model folder besides the weights: config, tokenizer, chat template."""
TOP_NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def load_decoder(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """Build the decoder of a model folder and load its weights."""
    decoder = Decoder(read_decoder_shape(folder), empty=True)
    state = {name: value.to(device=device, dtype=dtype, copy=True) for name, value in _state(folder, decoder).items()}
    decoder.load_state_dict(state, assign=True)
    return decoder.to(device=device, dtype=dtype)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a model folder under the names of the decoder's parameters, in the precision of its files."""
    return _state(folder, Decoder(read_decoder_shape(folder), empty=True))


def _state(folder: Path, decoder: Decoder) -> dict[str, Tensor]:
    public = read_public(folder)
    state: dict[str, Tensor] = {}
    for name in decoder.state_dict():
        names = public_names(name)
        missing = [n for n in names if n not in public]
        if missing:
            raise ModelError(f"{folder}: its weights lack {missing[0]!r}; pull the model again")
        state[name] = torch.cat([public[n] for n in names]) if len(names) > 1 else public[names[0]]
    known = {"lm_head.weight", *(public_name for name in state for public_name in public_names(name))}
    if unknown := sorted(name for name in public if name not in known and not name.endswith("rotary_emb.inv_freq")):
        raise ModelError(f"{folder}: it has {unknown[0]!r}, which the embedded engine would ignore; use another model or engine")
    return state


def save_decoder(decoder: Decoder, folder: Path) -> None:
    """Write `model.safetensors` into `folder`."""
    save_file(public_state(decoder), folder / "model.safetensors", metadata={"format": "pt"})


def public_state(decoder: Decoder) -> dict[str, Tensor]:
    """The weights under Hugging Face names, contiguous, on the CPU."""
    return {name: value.cpu().contiguous() for name, value in public_tensors(decoder).items()}


def public_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The weights under Hugging Face names, as views of the decoder's own."""
    state: dict[str, Tensor] = {}
    for name, value in decoder.state_dict().items():
        pieces = value.split(_split_sizes(name, decoder.shape, value))
        state |= {part: piece.detach() for part, piece in zip(public_names(name), pieces, strict=True)}
    return state


def public_names(name: str) -> list[str]:
    """Our parameter name → the names of what it stacks, e.g. `layers.3.qkv.weight` → q_proj, k_proj, v_proj of layer 3."""
    parts = name.split(".")
    if parts[0] == "layers":
        return [f"model.layers.{parts[1]}.{public}.{parts[3]}" for public in LAYER_NAMES[parts[2]]]
    return [f"{TOP_NAMES[parts[0]]}.{parts[1]}"]


def _split_sizes(name: str, shape: DecoderShape, value: Tensor) -> list[int]:
    if ".qkv." in name:
        return [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]
    return [shape.inner, shape.inner] if ".gate_up." in name else [value.shape[0]]


def copy_settings(model: Path, folder: Path) -> None:
    """Copy all but the weights of a model folder: also of an adapter's or a checkpoint's, without what makes it one."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix in MODEL_SUFFIXES and file.name not in (STATE, ADAPTER_CONFIG, f"{WEIGHTS}.index.json"):
            shutil.copyfile(file, folder / file.name)


def write_public(weights: dict[str, Tensor], folder: Path, *, settings: Path) -> None:
    """Write a model folder of these weights, with config and tokenizer of the folder `settings`; whole or not at all."""
    part = folder.with_name(f"{folder.name}.part")
    try:
        copy_settings(settings, part)
        save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        sync_tree(part)
        part.rename(folder)
    except OSError as cause:
        shutil.rmtree(part, ignore_errors=True)
        raise ModelError(
            f"{folder} cannot be written: {cause.strerror or cause}; free some space, or name another folder"
        ) from cause


def read_public(folder: Path) -> dict[str, Tensor]:
    """The weights of a model folder under Hugging Face names, in the precision of its files."""
    index = folder / "model.safetensors.index.json"
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
        public: dict[str, Tensor] = {}
        for shard in shards:
            public.update(load_file(folder / shard))
        return public
    except (OSError, SafetensorError, ValueError) as cause:
        raise ModelError(f"{folder}: weights cannot be read ({cause}); pull the model again") from cause
