"""The files of a checkpoint, against the sizes and checksums in its `state.json`. Needs no torch.

`state.json` marks a model folder as a checkpoint: it names every other file, and carries a checksum of its own.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from penstock.codec import from_json, to_json
from penstock.engines.adapter_files import is_adapter
from penstock.errors import ModelError
from penstock.records import PolicyVersion
from penstock.system.checksums import add_checksum, file_checksum, remove_checksum

OPTIMIZER, STATE = "optimizer.state", "state.json"
"""Files that only the trainer reads. The first has no .safetensors suffix, because other programs load such files as weights."""
OLD_OPTIMIZER = "optimizer.safetensors"
"""The optimizer's file in older checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    version: PolicyVersion
    files: dict[str, int]
    """Name and size in bytes of every other file."""
    python_random: tuple[int, ...]
    python_gauss: float | None
    torch_random: str
    """Hexadecimal, as is `cuda_random`."""
    cuda_random: str | None
    sha256: dict[str, str] = field(default_factory=dict[str, str])
    """Name and checksum of every other file; empty in older checkpoints."""
    run: str = ""
    """The id of its run; empty in older checkpoints."""


def read_state(folder: Path) -> CheckpointState:
    """ValueError or OSError if `state.json` is missing or damaged."""
    return from_json(CheckpointState, remove_checksum((folder / STATE).read_bytes()))


def encode_state(state: CheckpointState) -> bytes:
    return add_checksum(to_json(state))


def is_complete(folder: Path) -> bool:
    """Whether every file is there in its size: quick, but blind to changed bytes."""
    try:
        return _find_missing(folder, read_state(folder)) is None
    except (OSError, ValueError):
        return False


def find_damage(folder: Path, *, run: str | None = None, skip: Collection[str] = ()) -> str | None:
    """Read every file but those in `skip`; returns what is wrong, also that it is not of `run`, or None."""
    try:
        state = read_state(folder)
        if run is not None and state.run != run:
            return "it belongs to another run"
        if problem := _find_missing(folder, state):
            return problem
        for name, checksum in state.sha256.items():
            if name not in skip and file_checksum(folder / name) != checksum:
                return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{STATE} is missing"
    except (OSError, ValueError) as cause:
        return f"{STATE} cannot be read: {cause}"
    return None


def refuse_damaged_weights(folder: Path) -> None:
    """ModelError if the model folder is a checkpoint, or a policy's part of one, with damaged files, the optimizer's aside."""
    if is_adapter(folder) and not _is_checkpoint(folder):
        folder = folder.parent
    if _is_checkpoint(folder) and (problem := find_damage(folder, run=_run_around(folder), skip=(OPTIMIZER, OLD_OPTIMIZER))):
        raise ModelError(f"checkpoint {folder} is damaged: {problem}; use another one, or restore a copy")


def find_adapter(path: Path) -> Path:
    """The adapter in `path`: a checkpoint, a folder of PEFT's, or a run, whose newest checkpoint it is. ModelError if none."""
    numbered = [folder for folder in (path / "checkpoints").glob("*") if folder.name.isdecimal() and is_complete(folder)]
    found = max(numbered, key=lambda folder: int(folder.name), default=path)
    if not is_adapter(found):
        several = [folder for folder in sorted(found.glob("*")) if is_adapter(folder)] if found.is_dir() else []
        one = (
            f"it holds those of several policies; name one, such as {several[0]}" if several else "give a run or checkpoint of LoRA"
        )
        raise ModelError(f"{found} is no LoRA adapter; {one}")
    refuse_damaged_weights(found)
    return found


def _run_around(folder: Path) -> str | None:
    """The id of the run in whose folder the checkpoint is; None if it was copied elsewhere, or the run is an older one."""
    try:
        return orjson.loads((folder.parent.parent / "config.json").read_bytes())["id"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _is_checkpoint(folder: Path) -> bool:
    """False also for a model whose `state.json` is another program's."""
    try:
        content: Any = orjson.loads((folder / STATE).read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return isinstance(content, dict) and any(name in content for name in ("version", "files", "torch_random"))


def _find_missing(folder: Path, state: CheckpointState) -> str | None:
    for name, size in state.files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if (found := file.stat().st_size) != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
    return None
