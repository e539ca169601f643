"""Opens the embedded engine on a model folder."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineSection
from penstock.engines.cpu_features import VARIABLE, WITHOUT_AMX, limit_onednn
from penstock.engines.embedded.core import Core
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.weights import load_decoder
from penstock.errors import ConfigError, ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_engine(
    folder: Path, *, name: str, section: EngineSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> EmbeddedEngine:
    """Load the model in `folder` and start serving it as policy version 0. Stop strings need `decode`, from ids to text."""
    device = pick_device(section.device)
    dtype = pick_dtype(section.dtype, device)
    decoder = load_decoder(folder, device=device, dtype=dtype)
    core = Core(decoder, slots=section.slots, cache_tokens=section.cache_tokens, decode=decode)
    return EmbeddedEngine(core, name=name, queue_limit=section.queue, seed=seed, stop_ids=end_ids(folder))


def pick_device(name: str) -> torch.device:
    """The device that `engine.device` means; "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as cause:
        reason = str(cause).splitlines()[0]
        raise ConfigError(f"engine.device = {name!r} cannot be used here ({reason}); leave it at 'auto'") from cause
    return device


def pick_dtype(name: str, device: torch.device, *, limit: Callable[[], bool] = limit_onednn) -> torch.dtype:
    """The precision that `engine.dtype` means; "auto" is bfloat16 on a GPU and float32 on a CPU, where it is faster.

    Before bfloat16 on a CPU, `limit` keeps this process from instructions that would end it, and says whether it did.
    """
    dtype = DTYPES[name] if name != "auto" else torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype == torch.bfloat16 and device.type == "cpu" and limit() and _uses_amx():
        raise ConfigError(
            f"engine.dtype = {name!r}: this CPU claims AMX and cannot run it, and torch has chosen it already; "
            f"set {VARIABLE}={WITHOUT_AMX} in the environment and start again"
        )
    return dtype


def _uses_amx() -> bool:
    """Whether oneDNN made its choice before it was limited: without AMX it would not compute in float16 either."""
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def end_ids(folder: Path) -> frozenset[int]:
    """The ids that end a reply: those of the model's generation config (else its config), and its tokenizer's."""
    ids: int | list[int] | None = _read(folder / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = _read(folder / "config.json").get("eos_token_id")
    named = {ids} if isinstance(ids, int) else set(ids or ())
    token: str | dict[str, Any] | None = _read(folder / "tokenizer_config.json").get("eos_token")
    text = token["content"] if isinstance(token, dict) else token
    added: list[dict[str, Any]] = _read(folder / "tokenizer.json").get("added_tokens", [])
    return frozenset(named | {entry["id"] for entry in added if entry["content"] == text})


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelError(f"{path}: cannot be read ({cause}); pull the model again") from cause
