"""The policy network: a Llama-family decoder that engine and trainer share, weights included.

It knows no cache: each layer passes queries, keys and values to an `attend` function. The engine's writes to its cache, the
trainer's shares prompt prefixes, and `causal` is the plain forward pass.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from penstock.engines.checkpoint_files import ADAPTER_CONFIG, STATE
from penstock.errors import ModelError
from penstock.system.files import sync_tree

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [batch, heads, time, dim], keys and values [batch, kv_heads, time, dim]) → [batch, heads, time, dim]."""


class Architecture(NamedTuple):
    """How an architecture differs from Llama, beyond what its `config.json` says."""

    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = False
    """Whether `sliding_window` in `config.json` is in force without `use_sliding_window`."""


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(sliding_window=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
}
"""By the name in `config.json`. One with other tensor names also needs them in `weights.py`."""

FEW_ROWS = (4, 48)
"""For this many rows MKL computes x @ weightᵀ on one core; on two cores weight @ xᵀ is 1.5 to 3 times as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder, from a model folder's `config.json`."""

    vocab_size: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    tied: bool = True
    """Whether the embedding is also the output layer."""
    qkv_bias: bool = False
    qk_norm: bool = False


def read_decoder_shape(folder: Path) -> DecoderShape:
    """Read `config.json`; ModelError for a model that this decoder cannot run."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = (config.get("architectures") or ["unknown"])[0]
    architecture = ARCHITECTURES.get(kind)
    if architecture is None and "vision_config" in config:
        raise ModelError(
            f"{folder}: a {kind} sees pictures, and the layers here are for text: it can be sampled through vLLM "
            "(`penstock gateway`, `run`, `eval`), not trained"
        )
    if architecture is None:
        raise ModelError(f"{folder}: the embedded engine cannot run a {kind}; it runs {', '.join(ARCHITECTURES)}")
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope if rope.get("rope_type", rope.get("type", "default")) != "default" else None
    if scaling and scaling.get("rope_type") != "llama3":
        raise ModelError(f"{folder}: rope scaling {scaling.get('rope_type')!r} is not supported by the embedded engine")
    if config.get("use_sliding_window") or (architecture.sliding_window and config.get("sliding_window")):
        raise ModelError(f"{folder}: sliding-window attention is not supported by the embedded engine")
    heads = config["num_attention_heads"]
    return DecoderShape(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        context_length=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=architecture.qkv_bias or bool(config.get("attention_bias")),
        qk_norm=architecture.qk_norm,
    )


def sees_pictures(folder: Path) -> bool:
    """Whether the model in `folder` is one of pictures, which this decoder cannot run."""
    file = folder / "config.json"
    return file.exists() and "vision_config" in json.loads(file.read_text(encoding="utf-8"))


class RmsNorm(nn.RMSNorm):
    """RMS norm. Without gradients it takes half the operations: on one token, launching them costs as much as computing them."""

    floor: Tensor

    def __init__(self, size: int, eps: float, *, device: str | None = None) -> None:
        super().__init__(size, eps=eps, device=device)
        self.register_buffer("floor", torch.tensor(eps), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            return super().forward(x)
        length = cast(Tensor, torch.linalg.vector_norm(x, 2, -1, True))
        return (x * torch.addcmul(self.floor, length, length, value=1.0 / x.shape[-1]).rsqrt_()).mul_(self.weight)


class Projection(nn.Linear):
    """A linear layer that an adapter may add to."""

    adapter: Callable[[Tensor, Tensor], Tensor] | None = None
    """(input, output) → the output with what the adapter adds; see `lora.py`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        output = _linear(input, self.weight, self.bias)
        return output if self.adapter is None else self.adapter(input, output)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm. Projections that read the same input are one matrix."""

    def __init__(self, shape: DecoderShape, index: int, *, device: str | None = None) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        width, eps = shape.heads * shape.head_dim, shape.norm_eps
        self.norm1 = RmsNorm(shape.hidden, eps, device=device)
        self.qkv = Projection(shape.hidden, width + 2 * shape.kv_heads * shape.head_dim, bias=shape.qkv_bias, device=device)
        self.q_norm = RmsNorm(shape.head_dim, eps, device=device) if shape.qk_norm else None
        self.k_norm = RmsNorm(shape.head_dim, eps, device=device) if shape.qk_norm else None
        self.out = Projection(width, shape.hidden, bias=False, device=device)
        self.norm2 = RmsNorm(shape.hidden, eps, device=device)
        self.gate_up = Projection(shape.hidden, 2 * shape.inner, bias=False, device=device)
        self.down = Projection(shape.inner, shape.hidden, bias=False, device=device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [batch, time, hidden]; cos, sin [batch, time, 1, dim]."""
        return self.mix(x, attend(self.index, *self.heads(x, cos, sin)))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what attention reads: q, k and v, each [batch, heads, time, dim]."""
        shape, (batch, time, _) = self.shape, x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, -1, shape.head_dim)
        rotated, v = heads.tensor_split([shape.heads + shape.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rotated.tensor_split([shape.heads], dim=2)
            rotated = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        q, k = rotate(rotated, cos, sin).tensor_split([shape.heads], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def mix(self, x: Tensor, attended: Tensor) -> Tensor:
        """Adds to x what attention gave, [batch, heads, time, dim], then the feed-forward part."""
        x = x + self.out(attended.transpose(1, 2).reshape(*x.shape[:2], -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Token ids to hidden states. `logits` is separate, so that it is computed only where it is needed."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: DecoderShape, *, empty: bool = False) -> None:
        """Weights are random; if `empty`, they have shapes alone and must be assigned, which saves seconds."""
        super().__init__()
        self.shape = shape
        device = "meta" if empty else None
        # Not `nn.Embedding` itself: its random numbers on "meta" would import torch's compiler.
        embedding = torch.empty(shape.vocab_size, shape.hidden, device="meta") if empty else None
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden, _weight=embedding)
        self.layers = nn.ModuleList(DecoderLayer(shape, index, device=device) for index in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_eps, device=device)
        self.head = None if shape.tied else nn.Linear(shape.hidden, shape.vocab_size, bias=False, device=device)
        cos, sin = _rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """ids, positions [batch, time] → hidden states after the last norm [batch, time, hidden]."""
        x = self.embed(ids)
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states […, hidden] → float32 logits […, vocab]."""
        return _linear(hidden, self.embed.weight if self.head is None else self.head.weight).float()

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention over the whole sequence; the reference for all other `attend` functions."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x […, in] times weight [out, in]; for few rows on a CPU as weight @ xᵀ, see FEW_ROWS."""
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or not FEW_ROWS[0] <= rows <= FEW_ROWS[1]:
        return F.linear(x, weight, bias)
    product = torch.mm(weight, x.reshape(rows, -1).t()).t()
    return (product if bias is None else product + bias).view(*x.shape[:-1], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + dim/2) of x […, dim] by its angle; the first half of `sin` is negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rope_table(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's rotations, each [context_length, head_dim], in the form that `rotate` takes."""
    inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    if (scaling := shape.rope_scaling) is not None:
        length = scaling["original_max_position_embeddings"]
        low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
        smooth = ((length * inverse / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        inverse = smooth * inverse + (1 - smooth) * inverse / factor
    angles = torch.outer(torch.arange(shape.context_length, dtype=torch.float64), inverse)
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


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
