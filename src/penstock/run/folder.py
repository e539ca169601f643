"""The run folder: everything a run leaves behind, in one place that can be zipped and sent to a colleague."""

import hashlib
import secrets
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.config import RunConfig, make_config
from penstock.errors import ConfigError
from penstock.pool import POOLS
from penstock.system.files import create_private, write_file
from penstock.system.locks import exclusive_lock

MAY_CHANGE = (
    "run.folder", "train.steps", "train.checkpoint_every", "train.checkpoints_kept", "train.eval_every", "eval.", "gateway.",
    "executor.", "scale.", "engine.url", "engine.api_key_env", "engine.retries", "engine.retry_s", "engine.first_token_s",
    "engine.stall_s",
)  # fmt: skip
"""Keys, or how they begin, that a resumed run may change: none of them changes what was trained so far."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path
    resumed: bool

    @property
    def checkpoints(self) -> Path:
        """Policy versions, one folder each."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def config(self) -> RunConfig:
        """What the run was started with."""
        return make_config(orjson.loads((self.path / "config.json").read_bytes())["config"], str(self.path / "config.json"))

    def forget(self) -> None:
        """Take back that this run was started, so that it can be started later."""
        (self.path / "config.json").unlink()

    def secret(self) -> bytes:
        """The key that signs this run's model tokens; made once, readable by the owner only."""
        file = self.path / "secret"
        if not file.exists():
            create_private(file, secrets.token_bytes(32))
        return file.read_bytes()

    def metrics(self) -> list[dict[str, Any]]:
        """One entry per training step; a line that a kill cut short is left out."""
        lines = _lines(self.path / "metrics.jsonl")
        return [orjson.loads(line) for line in lines if line.endswith(b"}\n")]

    def add_metrics(self, entry: dict[str, Any]) -> None:
        """Append the metrics of one step."""
        with (self.path / "metrics.jsonl").open("ab") as out:
            out.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))

    def keep_metrics(self, steps: int) -> list[dict[str, Any]]:
        """Forget the metrics of steps after `steps`, which a kill undid; return those kept."""
        kept = [entry for entry in self.metrics() if entry["step"] <= steps]
        text = b"".join(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for entry in kept)
        write_file(self.path / "metrics.jsonl", text)
        return kept

    def evaluations(self) -> dict[str, float | None]:
        """Held-out rewards by when they were measured, such as `before-0` or `during-8`; None where one was due and not made."""
        file = self.path / "evals.json"
        return orjson.loads(file.read_bytes()) if file.exists() else {}

    def add_evaluation(self, when: str, reward: float | None) -> None:
        """Keep a held-out reward, so that a resumed run need not measure it again."""
        write_file(self.path / "evals.json", orjson.dumps({**self.evaluations(), when: reward}))

    def keep_evaluations(self, steps: int) -> None:
        """Forget what was measured after `steps`, of weights that a kill undid."""
        kept = {when: reward for when, reward in self.evaluations().items() if int(when.rpartition("-")[2]) <= steps}
        if kept != self.evaluations():
            write_file(self.path / "evals.json", orjson.dumps(kept))

    def summary(self) -> bytes | None:
        """What the run came to when it last ended, as JSON."""
        file = self.path / "summary.json"
        return file.read_bytes() if file.exists() else None

    def write_summary(self, summary: bytes) -> None:
        """Keep what the run came to."""
        write_file(self.path / "summary.json", orjson.dumps(orjson.loads(summary), option=orjson.OPT_INDENT_2))


def open_run_folder(
    config: RunConfig, *, fresh: bool, may_change: tuple[str, ...] = MAY_CHANGE, files: Sequence[Path] = ()
) -> RunFolder:
    """Make the folder, or take up the one that is there. Settings and files that are not as it was started with are refused.

    `may_change` are keys, or how they begin, of which that is not so; `files` are looked at beside the datasets.
    """
    path = config.run.folder / config.run.name
    settings = {"config": config.model_dump(mode="json"), "datasets": _digests(config, files)}
    if fresh and path.exists():
        with locked(path):
            _archive(path)
    file = path / "config.json"
    if file.exists():
        _refuse_changes(path, orjson.loads(file.read_bytes()), settings, may_change)
        return RunFolder(path, resumed=True)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_file(file, orjson.dumps(settings, option=orjson.OPT_INDENT_2))
    except OSError as cause:
        raise ConfigError(f"{path}: the run folder cannot be made: {cause.strerror}; set run.folder to a writable place") from cause
    return RunFolder(path, resumed=False)


def find_run_folder(path: Path) -> RunFolder:
    """The folder of a run that was started, for reading; ConfigError where it is none."""
    try:
        settings: Any = orjson.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        settings = None
    if not (isinstance(settings, dict) and {"config", "datasets"} <= settings.keys()):  # a checkpoint has a config.json too
        raise ConfigError(f"{path}: not a run folder; give one that `penstock train` made, such as runs/multiply")
    return RunFolder(path, resumed=True)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold the run for this process alone; the lock dies with the process."""
    refusal = ConfigError(f"{path}: another process is training this run; wait for it or pick another run.name")
    with exclusive_lock(path / ".lock", refusal):
        yield


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        yield from path.read_bytes().splitlines(keepends=True)


def _digests(config: RunConfig, others: Sequence[Path]) -> dict[str, str]:
    files = [config.dataset.train, config.dataset.eval, *others]
    return {str(file): _digest(file) for file in files if file is not None}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _archive(path: Path) -> None:
    """Keep a run under another name, its tables included where they are not in the folder."""
    kept, pool = _archive_name(path), dict[str, Any]()
    if (file := path / "config.json").exists():
        pool = orjson.loads(file.read_bytes())["config"]["pool"]
    if pool:
        POOLS.load(pool["name"]).rename_run(pool.get("url", ""), path.name, kept.name)
    path.rename(kept)


def _archive_name(path: Path) -> Path:
    number = 1
    while (old := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return old


def _refuse_changes(path: Path, before: dict[str, Any], now: dict[str, Any], may_change: tuple[str, ...]) -> None:
    old, new = _flat(before["config"]), _flat(orjson.loads(orjson.dumps(now["config"])))
    changed = [key for key in sorted({*old, *new}) if not key.startswith(may_change) and old.get(key) != new.get(key)]
    if changed:
        key = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise ConfigError(
            f"{path} was started with {key} = {old.get(key)!r}, now it is {new.get(key)!r}{more}; "
            "change it back, set another run.name, or start over with --fresh (the old run is kept)"
        )
    if other := [name for name, digest in now["datasets"].items() if before["datasets"].get(name) != digest]:
        raise ConfigError(f"{path} was started when {other[0]} was another; set another run.name, or start over with --fresh")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[prefix + key] = value
    return flat
