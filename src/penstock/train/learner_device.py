"""Where the learner computes if the engine is on servers: its device and precision, and how it shares a GPU with them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from penstock.config import RunConfig
from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.engine import pick_device, pick_dtype
from penstock.engines.embedded.weights import load_decoder
from penstock.engines.servers.vllm import VllmEngine
from penstock.errors import ConfigError, TrainError

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
            f"{device} has no room for the learner's weights beside what else is there; start vLLM with a lower "
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
        f"{later / GIB:.1f} more beside what its passes need"
    ]
