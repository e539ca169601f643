"""GGUF to a model folder: dequantized once to float32 safetensors, by transformers, in a process of its own.

A process of its own gives back its memory, keeps its progress bars to itself, and leaves nothing imported in ours.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copyfileobj

from penstock.errors import ModelError

CHILD = "penstock.models.dequantize"
NEEDS = ("torch", "transformers", "accelerate", "gguf", "safetensors")


def convert_gguf(file: Path, folder: Path) -> None:
    """Fill `folder` with the model in `file`; ModelError says why it cannot be."""
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(f"{file} is not a GGUF file, whatever its name says; fetch it again")
    command = [sys.executable, "-P", "-m", CHILD, str(file), str(folder)]
    result = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    if result.returncode == 0:
        return
    if "No space left on device" in result.stderr:
        raise ModelError(f"the disk is full: {file.name} could not be converted; free some space, or set PENSTOCK_CACHE")
    reason = (result.stderr.strip().splitlines() or [f"ended with status {result.returncode}"])[-1]
    raise ModelError(f"{file.name} cannot be converted: {reason}; give a GGUF file of a model that transformers can read")


def unzip(archive: Path, member: str, target: Path) -> Path:
    """Write one member of `archive` to `target`."""
    with zipfile.ZipFile(archive) as opened, opened.open(member) as source, target.open("wb") as copy:
        copyfileobj(source, copy, 1 << 20)
    return target
