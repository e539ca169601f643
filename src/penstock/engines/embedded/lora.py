"""LoRA adapters of the decoder: each adds the product of two thin matrices to some of its projections.

The trainer's decoder has one `Adapter`, whose parameters are the tensors of PEFT's format. The engine's has `AdapterSlots`, which
hold the adapters of several policies, and each row of a batch chooses one of them. Both compute the same way: a projection's input
times all `lora_A` as one matrix, times all `lora_B` as one block-diagonal matrix, which is already multiplied by alpha / rank.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from penstock.engines.checkpoint_files import (
    ADAPTER_WEIGHTS,
    BASE_DIGEST,
    AdapterConfig,
    find_base,
    is_adapter,
    read_adapter_config,
    write_adapter_config,
)
from penstock.engines.embedded.decoder import (
    LAYER_NAMES,
    Decoder,
    DecoderLayer,
    DecoderShape,
    Projection,
    load_decoder,
    read_decoder_shape,
    read_public,
    write_public,
)
from penstock.engines.embedded.kv_cache import NO_ADAPTER
from penstock.errors import ModelError

PROJECTIONS = ("qkv", "out", "gate_up", "down")


class ProjectionPart(NamedTuple):
    """One of the linear layers that a projection stacks."""

    name: str
    """As in `target_modules`."""
    prefix: str
    """What its tensors' names begin with in PEFT's format."""
    inputs: int
    outputs: int


def projection_parts(shape: DecoderShape, layer: int, projection: str) -> list[ProjectionPart]:
    """Returns what a projection stacks, in order."""
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "qkv": [(shape.hidden, width), (shape.hidden, kv), (shape.hidden, kv)],
        "out": [(width, shape.hidden)],
        "gate_up": [(shape.hidden, shape.inner)] * 2,
        "down": [(shape.inner, shape.hidden)],
    }
    names = zip(LAYER_NAMES[projection], sizes[projection], strict=True)
    return [ProjectionPart(n.rpartition(".")[2], f"base_model.model.model.layers.{layer}.{n}.lora_", *size) for n, size in names]


def add_low_rank(x: Tensor, y: Tensor, a: Tensor, b: Tensor, chosen: Tensor | None = None) -> Tensor:
    """y […, out] + x […, in] aᵀ bᵀ, for a [thin, in] and b [out, thin].

    `chosen` [rows, n] multiplies each n consecutive numbers of what lies between the two products.
    """
    thin = F.linear(x, a)
    if chosen is not None:
        thin = (thin.view(*x.shape[:-1], -1, chosen.shape[1]) * chosen.unsqueeze(1)).flatten(-2)
    return torch.addmm(y.flatten(0, -2), thin.flatten(0, -2), b.t()).view_as(y)


# One adapter, with gradients


class ProjectionAdapter:
    """What an adapter adds to one projection; see `Projection.adapter`."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], outputs: list[int], targeted: list[bool], scale: float) -> None:
        """`pairs` are lora_A [rank, in] and lora_B [out, rank] of the parts that are `targeted`."""
        self.a, self.b = [a for a, _ in pairs], [b for _, b in pairs]
        self.outputs, self.targeted, self.scale = outputs, targeted, scale

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return add_low_rank(x, y, torch.cat(self.a), self.expansion())

    def expansion(self) -> Tensor:
        """Returns [out, rank * targeted parts]: block-diagonal, with rows of zeros for parts that are not targeted."""
        wanted = iter(self.b)
        blocks = [next(wanted) if targeted else None for targeted in self.targeted]
        like = self.b[0]
        filled = [like.new_zeros(n, 0) if b is None else b for b, n in zip(blocks, self.outputs, strict=True)]
        return cast(Tensor, torch.block_diag(*filled)) * self.scale  # pyright: ignore[reportUnknownMemberType]


class Adapter:
    """An adapter of a decoder of this shape. Its parameters have PEFT's names."""

    def __init__(
        self, shape: DecoderShape, config: AdapterConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """Starts as PEFT's do: lora_A is drawn by `seed`, lora_B is 0, so that nothing is added yet."""
        self.shape, self.config = shape, config
        generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, nn.Parameter] = {}
        for _, _, parts in self.targeted():
            for part in parts:
                bound = 1.0 / math.sqrt(part.inputs)
                drawn = torch.empty(config.rank, part.inputs).uniform_(-bound, bound, generator=generator)
                self.parameters[f"{part.prefix}A.weight"] = nn.Parameter(drawn.to(device, dtype))
                self.parameters[f"{part.prefix}B.weight"] = nn.Parameter(
                    torch.zeros(part.outputs, config.rank, device=device, dtype=dtype)
                )

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank

    def attach(self, decoder: Decoder) -> None:
        """Makes the decoder add this adapter. Gradients go to the adapter alone."""
        decoder.requires_grad_(False)
        detach_adapters(decoder)
        for layer, projection, parts in self.targeted():
            module = projection_of(decoder, layer, projection)
            every = projection_parts(self.shape, layer, projection)
            module.adapter = ProjectionAdapter(
                [self.pair(part) for part in parts], [part.outputs for part in every], [part in parts for part in every], self.scale
            )

    def pair(self, part: ProjectionPart) -> tuple[nn.Parameter, nn.Parameter]:
        return self.parameters[f"{part.prefix}A.weight"], self.parameters[f"{part.prefix}B.weight"]

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors of PEFT's names; ModelError if they are not those of this adapter."""
        for name in tensors.keys() ^ self.parameters.keys():
            raise ModelError(f"the adapter {'has' if name in tensors else 'lacks'} {name!r}, which does not fit its config")
        for name, parameter in self.parameters.items():
            if tensors[name].shape != parameter.shape:
                raise ModelError(f"the adapter's {name!r} is {list(tensors[name].shape)} instead of {list(parameter.shape)}")
            parameter.copy_(tensors[name])

    def save(self, folder: Path) -> None:
        """Writes the two files of PEFT's format."""
        write_adapter_config(folder, self.config)
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in self.parameters.items()}
        # With one entry alone: several are written in any order, and equal adapters would differ in their bytes.
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={BASE_DIGEST: self.config.base_digest})

    def targeted(self) -> Iterator[tuple[int, str, list[ProjectionPart]]]:
        """Yields layer, projection and parts, for each projection that has any."""
        for layer in range(self.shape.layers):
            for projection in PROJECTIONS:
                parts = [p for p in projection_parts(self.shape, layer, projection) if p.name in self.config.target_modules]
                if parts:
                    yield layer, projection, parts


def read_adapter(
    folder: Path, shape: DecoderShape, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Adapter:
    """Read an adapter for a decoder of this shape; ModelError if it does not fit."""
    adapter = Adapter(shape, read_adapter_config(folder), device=device, dtype=dtype)
    try:
        adapter.load(load_file(folder / ADAPTER_WEIGHTS))
    except (OSError, SafetensorError, ValueError) as cause:
        raise ModelError(f"{folder / ADAPTER_WEIGHTS}: cannot be read ({cause}); restore a copy") from cause
    except ModelError as cause:
        raise ModelError(f"{folder}: {cause}") from cause
    return adapter


def load_policy(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """Load a model folder or, for an adapter's folder, its base with the adapter attached."""
    if not is_adapter(folder):
        return load_decoder(folder, device=device, dtype=dtype)
    decoder = load_decoder(find_base(folder), device=device, dtype=dtype)
    read_adapter(folder, decoder.shape, device=device, dtype=dtype).attach(decoder)
    return decoder


class MergedModel(NamedTuple):
    """What merging did to the weights that the adapter adds to."""

    dtype: str
    """The precision of the base, in which the merged weights are saved."""
    kept: float
    """The share of what the adapter adds that rounding to it has left; 1 if nothing was lost."""
    largest: float
    """The largest difference of a merged weight from its exact value."""


@torch.no_grad()
def merge_adapter(folder: Path, out: Path, *, base: Path | None = None) -> MergedModel:
    """Writes base and adapter as one plain model folder; ModelError if the base is not there or `out` exists."""
    found = find_base(folder, base)
    if out.exists():
        raise ModelError(f"{out} is there already; name another folder")
    weights = read_public(found)
    adapter = read_adapter(folder, read_decoder_shape(found))
    wanted = kept = torch.zeros((), dtype=torch.float64)
    largest, dtype = 0.0, torch.float32
    for _, _, parts in adapter.targeted():
        for part in parts:
            name = part.prefix.removeprefix("base_model.model.").removesuffix("lora_") + "weight"
            lora_a, lora_b = adapter.pair(part)
            before, dtype = weights[name].double(), weights[name].dtype
            added = (lora_b.double() @ lora_a.double()) * adapter.scale
            weights[name] = (before + added).to(dtype)
            moved = weights[name].double() - before
            largest = max(largest, float((moved - added).abs().max()))
            wanted, kept = wanted + added.square().sum(), kept + (moved * added).sum()
    write_public(weights, out, settings=found)
    return MergedModel(str(dtype).removeprefix("torch."), float(kept / wanted) if wanted else 1.0, largest)


def share_decoder(decoder: Decoder) -> Decoder:
    """Returns a second decoder of the same tensors, without an adapter: attaching one there changes nothing here."""
    shared = {id(tensor): tensor for tensor in (*decoder.parameters(), *decoder.buffers())}
    shared |= {id(p.adapter): None for p in projections(decoder) if p.adapter is not None}
    return copy.deepcopy(decoder, cast("dict[int, object]", shared))


def detach_adapters(decoder: Decoder) -> None:
    for projection in projections(decoder):
        projection.adapter = None


def projections(decoder: Decoder) -> Iterator[Projection]:
    return (projection_of(decoder, layer, name) for layer in range(decoder.shape.layers) for name in PROJECTIONS)


def projection_of(decoder: Decoder, layer: int, name: str) -> Projection:
    return cast(Projection, getattr(cast(DecoderLayer, decoder.layers[layer]), name))


# Several adapters in one batch


class SlotProjection:
    """The adapters of all slots for one projection; see `Projection.adapter`. A row reads the slot that it chose."""

    def __init__(self, slots: "AdapterSlots", a: Tensor, b: Tensor) -> None:
        self.slots = slots
        self.a, self.b = a, b
        """[parts, slots, rank, in] and [out, parts, slots, rank]"""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return add_low_rank(x, y, self.a.flatten(0, 2), self.b.flatten(1), self.slots.chosen)


class AdapterSlots:
    """The adapters that an engine's decoder adds, by policy.

    Matrices of all slots lie side by side, padded to the largest rank: every row is multiplied with all of them, and what lies
    between the two products is multiplied by 0 in the slots that the row did not choose. For a few adapters that is less work than
    to gather a row's own, and it can be captured in a graph.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._projections: dict[tuple[int, str], SlotProjection] = {}
        self.policies: list[str] = []
        """By slot."""
        self.rank = 0
        self._table = torch.zeros(1, 0, device=decoder.device)
        self.chosen = self._table
        """[rows, slots * rank]: 1 in the slot that the row chose, else 0; of the batch that is computed next."""

    def slot(self, policy: str) -> int:
        """Returns the slot of a policy, or NO_ADAPTER."""
        return self.policies.index(policy) if policy in self.policies else NO_ADAPTER

    def choose(self, slots: Tensor) -> None:
        """Sets the slot of each row of the next batch, [rows]; NO_ADAPTER takes the base alone."""
        self.chosen = self._table[slots]

    def tensors(self) -> list[Tensor]:
        """Returns what a captured graph reads."""
        return [self._table, *(tensor for one in self._projections.values() for tensor in (one.a, one.b))]

    @torch.no_grad()
    def put(self, policy: str, adapter: Adapter) -> None:
        """Copies an adapter to the policy's slot. A new policy, a larger rank or another target makes new tensors."""
        targets = {(layer, name) for layer, name, _ in adapter.targeted()}
        if policy not in self.policies or adapter.config.rank > self.rank or not targets <= self._projections.keys():
            self._grow(policy, adapter.config.rank, targets)
        slot, rank = self.slot(policy), adapter.config.rank
        for (layer, name), projection in self._projections.items():
            projection.a[:, slot] = 0
            projection.b[:, :, slot] = 0
            row = 0
            for at, part in enumerate(projection_parts(self._decoder.shape, layer, name)):
                if part.name in adapter.config.target_modules:
                    lora_a, lora_b = adapter.pair(part)
                    projection.a[at, slot, :rank] = lora_a
                    projection.b[row : row + part.outputs, at, slot, :rank] = lora_b * adapter.scale
                row += part.outputs

    def _grow(self, policy: str, rank: int, targets: set[tuple[int, str]]) -> None:
        """Makes room, and keeps what is there."""
        before, self.policies = len(self.policies), [*self.policies, *([] if policy in self.policies else [policy])]
        old_rank, self.rank = self.rank, max(self.rank, rank)
        slots, weight = len(self.policies), self._decoder.embed.weight
        for layer, name in sorted(targets | self._projections.keys()):
            parts = projection_parts(self._decoder.shape, layer, name)
            outputs = sum(part.outputs for part in parts)
            a = weight.new_zeros(len(parts), slots, self.rank, parts[0].inputs)
            b = weight.new_zeros(outputs, len(parts), slots, self.rank)
            if old := self._projections.get((layer, name)):
                a[:, :before, :old_rank], b[:, :, :before, :old_rank] = old.a, old.b
            made = self._projections[layer, name] = SlotProjection(self, a, b)
            projection_of(self._decoder, layer, name).adapter = made
        chosen = torch.eye(slots, device=weight.device, dtype=weight.dtype).repeat_interleave(self.rank, 1)
        self._table = F.pad(chosen, (0, 0, 0, 1))  # the last row is NO_ADAPTER's
