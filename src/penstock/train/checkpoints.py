"""Checkpoints: policy versions saved, and restored bit for bit.

`checkpoints/000012/` is a model folder (weights, or a LoRA adapter; config, tokenizer) that also holds the optimizer's state and
`state.json`: the version with its leases, the random states, and the size and checksum of every file. It is written under a
temporary name, synced, then renamed, so that a crash cannot leave half of it. A folder that is damaged all the same is never
resumed from: it is renamed to `000012.damaged`, and the one before takes its place.
"""

import random
import shutil
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from penstock.config import TrainSection
from penstock.engines.checkpoint_files import (
    ADAPTER_WEIGHTS,
    OLD_OPTIMIZER,
    OPTIMIZER,
    STATE,
    CheckpointState,
    encode_state,
    find_damage,
    is_adapter,
    is_complete,
    read_state,
)
from penstock.engines.embedded.decoder import Decoder, copy_settings, save_decoder
from penstock.errors import ModelError, TrainError
from penstock.records import PolicyVersion
from penstock.system.files import file_checksum, sync
from penstock.train.learner import Learner

PART = ".part"
"""Suffix of a file or folder that is being written or removed."""
DAMAGED = ".damaged"
"""Suffix of a checkpoint that was set aside."""

MOST_STEPS, BYTES_PER_STEP = 10, 200_000_000
"""Of `train.checkpoint_every = "auto"`: at most so many steps between checkpoints, one more for each so many bytes."""

OnDisk = Callable[[Path], None]


def folder_of(checkpoints: Path, version: PolicyVersion) -> Path:
    """Returns the folder of a version, whether or not it exists."""
    return checkpoints / f"{version.number:06d}"


def save(
    checkpoints: Path,
    version: PolicyVersion,
    learners: Learner | Mapping[str, Learner],
    model: Path,
    *,
    run: str = "",
    kept: int = 2,
    on_disk: OnDisk = sync,
) -> Path:
    """Writes `version`, then removes all but the newest `kept`; returns its folder. The weights must not change meanwhile.

    Copies config and tokenizer from the folder `model`. A number always names the same weights: for a version that is on disk
    already (the step had nothing to learn), only `state.json` is replaced. Raises TrainError on disk errors; earlier versions
    are untouched. Calls `on_disk` to sync each file and folder after writing it.
    """
    target = folder_of(checkpoints, version)
    part = target.with_suffix(PART)
    with _disk_errors(f"checkpoint {target} could not be written", part):
        checkpoints.mkdir(parents=True, exist_ok=True)
        _remove_partial(checkpoints)
        if is_complete(target):
            before = read_state(target)
            _write_state(target, version, before.files, before.sha256, run, on_disk)
        else:
            shutil.rmtree(target, ignore_errors=True)
            _write(part, version, _by_policy(learners), model, run, on_disk)
            part.rename(target)
            on_disk(checkpoints)  # the rename is durable only once its parent folder is synced
    with _disk_errors(f"checkpoint {target} is saved, but those before it could not be removed"):
        for old in _complete(checkpoints)[:-kept]:
            old.rename(old.with_suffix(PART))  # atomic, so a kill during removal leaves no half checkpoint
        _remove_partial(checkpoints)
    return target


def checkpoint_interval(section: TrainSection, learners: Mapping[str, Learner]) -> int:
    """Returns the steps between checkpoints: what `train.checkpoint_every` says, or more for larger ones."""
    if section.checkpoint_every != "auto":
        return section.checkpoint_every
    return min(MOST_STEPS, 1 + sum(learner.checkpoint_bytes for learner in learners.values()) // BYTES_PER_STEP)


def disk_problem(checkpoints: Path, section: TrainSection, learners: Mapping[str, Learner]) -> str:
    """Says that the disk is too small for the checkpoints that are kept and the one that is being written; else an empty string."""
    size = sum(learner.checkpoint_bytes for learner in learners.values())
    there = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    needed = (section.checkpoints_kept + 1) * size - there
    free = shutil.disk_usage(checkpoints.parent).free
    if free >= needed:
        return ""
    return (
        f"the disk of {checkpoints.parent} has {free / 1e9:.1f} GB free, and checkpoints take {needed / 1e9:.1f} GB more "
        f"({section.checkpoints_kept + 1} of {size / 1e9:.1f} GB while one is written): free some, set run.folder to another disk, "
        "or train.method = 'lora'"
    )


def latest(checkpoints: Path) -> PolicyVersion | None:
    """Returns the newest complete version, or None."""
    complete = _complete(checkpoints)
    return read_state(complete[-1]).version if complete else None


class IntactCheckpoint(NamedTuple):
    """The newest intact version, and what is wrong with the newer ones."""

    version: PolicyVersion | None
    damaged: dict[Path, str]


def find_intact(checkpoints: Path, run: str) -> IntactCheckpoint:
    """Reads whole checkpoints of the run with this id, the newest first, until one is intact."""
    damaged: dict[Path, str] = {}
    for folder in reversed(_numbered(checkpoints)):
        problem = find_damage(folder, run=run)
        if problem is None:
            return IntactCheckpoint(read_state(folder).version, damaged)
        damaged[folder] = problem
    return IntactCheckpoint(None, damaged)


def set_aside(folder: Path) -> Path:
    """Renames a checkpoint, so that no reader takes it for a version any more; returns its new path."""
    number, target = 1, folder.with_suffix(DAMAGED)
    while target.exists():
        number += 1
        target = folder.with_suffix(f"{DAMAGED}{number}")
    with _disk_errors(f"checkpoint {folder} could not be set aside"):
        folder.rename(target)
    return target


def check_all(checkpoints: Path, run: str) -> dict[Path, str | None]:
    """Reads all checkpoints of the run with this id, oldest first; returns what is wrong with each: None for an intact one."""
    return {folder: find_damage(folder, run=run) for folder in _numbered(checkpoints)}


def has_checksums(folder: Path) -> bool:
    """False for a checkpoint of an older penstock, in which changed bytes cannot be detected."""
    return bool(read_state(folder).sha256)


def find(checkpoints: Path, number: int) -> Path | None:
    """Returns the folder of a version, or None if it is missing or incomplete."""
    folder = folder_of(checkpoints, PolicyVersion(number=number, step=0))
    return folder if is_complete(folder) else None


def is_half_precision(checkpoints: Path) -> bool:
    """Whether the newest complete version is in half precision: trainer and engine compute in the dtype of the weights."""
    for folder in reversed(_complete(checkpoints)):
        try:
            adapters = [folder / ADAPTER_WEIGHTS] if is_adapter(folder) else sorted(folder.glob(f"*/{ADAPTER_WEIGHTS}"))
            with next(iter(adapters), folder / "model.safetensors").open("rb") as file:
                header: dict[str, dict[str, Any]] = orjson.loads(file.read(int.from_bytes(file.read(8), "little")))
        except (OSError, ValueError, OverflowError, MemoryError):  # damaged
            continue
        return all(tensor["dtype"] in ("BF16", "F16") for name, tensor in header.items() if name != "__metadata__")
    return False


def _by_policy(learners: Learner | Mapping[str, Learner]) -> Mapping[str, Learner]:
    return {"": learners} if isinstance(learners, Learner) else learners


def restore(checkpoints: Path, version: PolicyVersion, learners: Learner | Mapping[str, Learner]) -> None:
    """Restores the weights (in place), optimizer and random states of `version`; of all policies, where there are several."""
    folder = folder_of(checkpoints, version)
    try:
        saved = read_state(folder)
        for policy, learner in _by_policy(learners).items():
            learner.load_weights(folder / policy)
            optimizer = folder / policy / (OLD_OPTIMIZER if OLD_OPTIMIZER in saved.files else OPTIMIZER)
            learner.load({name: value.clone() for name, value in load_file(optimizer).items()})
    except (OSError, SafetensorError, ModelError, ValueError, KeyError, RuntimeError) as cause:
        raise TrainError(f"checkpoint {folder} cannot be read: {cause}; remove it to resume from the one before") from cause
    random.setstate((3, saved.python_random, saved.python_gauss))
    torch.set_rng_state(_from_hex(saved.torch_random))
    if saved.cuda_random and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(saved.cuda_random))


def write_model(folder: Path, decoder: Decoder, model: Path) -> None:
    """Writes these weights as a model folder, with config and tokenizer copied from the folder `model`."""
    copy_settings(model, folder)
    save_decoder(decoder, folder)


def _write(part: Path, version: PolicyVersion, learners: Mapping[str, Learner], model: Path, run: str, on_disk: OnDisk) -> None:
    for policy, learner in learners.items():
        folder = part / policy
        copy_settings(model, folder)
        learner.save_weights(folder)
        save_file({name: value.detach().cpu().contiguous() for name, value in learner.state().items()}, folder / OPTIMIZER)
    files = sorted(file for file in part.rglob("*") if file.is_file())
    names = [file.relative_to(part).as_posix() for file in files]
    with ThreadPoolExecutor(len(files)) as threads:
        checksums = threads.map(file_checksum, files)  # computed while the disk is busy
        for file in files:
            on_disk(file)
        sha256 = dict(zip(names, checksums, strict=True))
    for policy in filter(None, learners):
        on_disk(part / policy)
    sizes = {name: file.stat().st_size for name, file in zip(names, files, strict=True)}
    _write_state(part, version, sizes, sha256, run, on_disk)  # last: it marks the folder as complete


def _write_state(
    folder: Path, version: PolicyVersion, sizes: dict[str, int], sha256: dict[str, str], run: str, on_disk: OnDisk
) -> None:
    _, numbers, gauss = random.getstate()
    saved = CheckpointState(
        version=version,
        files=sizes,
        python_random=numbers,
        python_gauss=gauss,
        torch_random=_to_hex(torch.get_rng_state()),
        cuda_random=_to_hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        sha256=sha256,
        run=run,
    )
    part = folder / f"{STATE}{PART}"
    part.write_bytes(encode_state(saved))
    on_disk(part)  # before the rename, or a crash could leave an empty file under the final name
    part.replace(folder / STATE)
    on_disk(folder)


def _numbered(checkpoints: Path) -> list[Path]:
    """Returns the folders of all versions, oldest first."""
    return sorted((path for path in checkpoints.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))


def _complete(checkpoints: Path) -> list[Path]:
    return [path for path in _numbered(checkpoints) if is_complete(path)]


def _remove_partial(checkpoints: Path) -> None:
    """Removes folders that a killed process left half written or half removed."""
    for part in checkpoints.glob(f"*{PART}"):
        shutil.rmtree(part)


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


@contextmanager
def _disk_errors(what: str, part: Path | None = None) -> Generator[None]:
    try:
        yield
    except (OSError, SafetensorError) as cause:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        raise TrainError(f"{what}: {cause}; free some disk space and resume from the last checkpoint") from cause
