"""The learner's device: which one it takes, how much of a pass fits into its memory, and functions that are compiled for it."""

import asyncio
import resource
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config import RunConfig
from penstock.engines.embedded.decoder import Decoder, DecoderShape, load_decoder
from penstock.engines.embedded.engine import pick_device, pick_dtype
from penstock.engines.servers.vllm import VllmEngine
from penstock.errors import ConfigError, TrainError

MOST_TOKENS = 32768
"""More tokens in a pass are not faster."""
FEWEST_TOKENS = 2048
"""Passes are not made smaller than this while checkpoints can make room instead."""
USED = 0.8
"""The share of free memory that is planned with: the rest is for what backward passes hold for a moment."""
MOST_LOGITS, FEWEST_LOGITS = 2**29, 2**22
"""Bounds on the elements of one chunk of logits."""


class PassMemory:
    """Plans the passes of a decoder on a GPU."""

    def __init__(self, decoder: Decoder) -> None:
        self.shape, self._device = decoder.shape, decoder.device
        self._width = decoder.embed.weight.element_size()
        self.halvings = 0
        """How often memory ran out. Each time halves what is planned with."""

    def tokens_per_pass(self, reserved: int) -> int:
        """Returns how many tokens fit without checkpoints, if `reserved` bytes of the free memory are for something else."""
        fit = int(self._room(reserved)) // (self.shape.layers * layer_bytes(self.shape, self._width))
        return max(FEWEST_TOKENS >> self.halvings, min(MOST_TOKENS >> self.halvings, fit), 1)

    def checkpointed(self, tokens: int, reserved: int) -> int:
        """Returns how many layers a pass of `tokens` must checkpoint."""
        inputs = tokens * self.shape.layers * self.shape.hidden * self._width
        kept = int(max(0.0, self._room(reserved) - inputs)) // (tokens * layer_bytes(self.shape, self._width))
        return self.shape.layers - min(self.shape.layers, kept)

    def logits_rows(self, reserved: int) -> int:
        """Returns how many rows of logits may exist at once."""
        bound = int(self._free(reserved)) // (16 * self._width)
        return max(1, min(MOST_LOGITS, max(FEWEST_LOGITS, bound)) // self.shape.vocab_size)

    def _room(self, reserved: int) -> float:
        """Free memory for activations, in bytes."""
        logits = self.logits_rows(reserved) * self.shape.vocab_size * 2 * self._width
        head = self.shape.vocab_size * self.shape.hidden * (4 + self._width)
        return USED * self._free(reserved) - logits - head

    def _free(self, reserved: int) -> float:
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return max(0, free + cached - reserved) / 2**self.halvings


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes that this process has taken so far: of the GPU or, on a CPU, of memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def layer_bytes(shape: DecoderShape, width: int) -> int:
    """Returns about how many bytes a layer keeps for each token until the backward pass, for numbers of `width` bytes."""
    attention = 4 * (shape.heads + shape.kv_heads) * shape.head_dim  # of tokens, and as much again of their copies on paths
    return width * (4 * shape.hidden + attention + 3 * shape.inner) + 4 * shape.heads


MOST_VARIANTS = 64
"""torch compiles a function at most so often, for other dtypes and layouts."""


P = ParamSpec("P")
T = TypeVar("T")


def compile_once(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function compiled for a GPU, which takes seconds on its first call; once for all lengths of its arguments."""
    return _compile(function)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch._dynamo.config as settings

    settings.recompile_limit = max(settings.recompile_limit, MOST_VARIANTS)
    return torch.compile(function, dynamic=True, fullgraph=True)


def is_compile_error(error: Exception) -> bool:
    """Returns whether torch could not compile: there is no compiler, or a kernel is too large for the GPU."""
    return any(base.__name__ in ("TorchDynamoException", "FailOnRecompileLimitHit") for base in type(error).__mro__)


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies through pinned memory: from other memory the copy would wait until the GPU has done all that it was given before."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


GIB = 1 << 30


def refuse_learner_settings(config: RunConfig, *, shared: bool) -> None:
    """ConfigError if `train.device` or `train.dtype` would be ignored, as the engine shares its weights with the learner."""
    for name in ("device", "dtype") if shared else ():
        if getattr(config.train, name) != "auto":
            raise ConfigError(
                f"train.{name}: the {config.engine.name} engine and the learner share their weights; set engine.{name}"
            )


def pick_learner_device(name: str) -> torch.device:
    """The device that `train.device` names; "auto" is the GPU with the most free memory: servers fill those that they use."""
    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda", max(range(torch.cuda.device_count()), key=lambda index: torch.cuda.mem_get_info(index)[0]))
    return pick_device(name, "train.device")


def load_learner_decoder(config: RunConfig, folder: Path) -> Decoder:
    device = pick_learner_device(config.train.device)
    dtype = pick_dtype(config.train.dtype, device)
    try:
        return load_decoder(folder, device=device, dtype=dtype)
    except torch.OutOfMemoryError as cause:
        raise TrainError(
            f"{device} has no room for the learner's weights next to what else is there; start vLLM with a lower "
            "--gpu-memory-utilization, or set train.device"
        ) from cause


@asynccontextmanager
async def sleeping(engine: VllmEngine) -> AsyncGenerator[None]:
    """Let servers sleep; what an update took of the GPU's memory is given back before they wake."""
    async with engine.asleep():
        try:
            yield
        finally:
            if torch.cuda.is_available():
                await asyncio.to_thread(torch.cuda.empty_cache)


def memory_split(decoder: Decoder, trained: int) -> list[str]:
    """How the learner, which trains so many bytes of weights, and all else share its GPU, in words; empty on a CPU."""
    if decoder.device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(decoder.device)
    weight = decoder.embed.weight
    mine = sum(weight.numel() * weight.element_size() for weight in decoder.parameters())
    # Gradients and two moments; in half precision the masters, which are trained, too.
    later = trained // weight.element_size() * (12 if weight.dtype == torch.float32 else 14)
    return [
        f"the learner is on {decoder.device} in {str(weight.dtype).removeprefix('torch.')}: of {total / GIB:.1f} GiB servers and "
        f"others hold {(total - free - mine) / GIB:.1f}, {free / GIB:.1f} are free, and the learner will take about "
        f"{later / GIB:.1f} more next to what its passes need"
    ]
