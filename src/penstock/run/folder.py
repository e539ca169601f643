"""The run folder: every file of a run, in one place that can be zipped and sent to a colleague."""

import hashlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.config import RunConfig, make_config
from penstock.errors import ConfigError
from penstock.pool import POOLS
from penstock.system.files import write_file
from penstock.system.locks import exclusive_lock

MAY_CHANGE = (
    "run.folder", "train.steps", "train.checkpoint_every", "train.checkpoints_kept", "train.eval_every", "eval.", "gateway.",
    "executor.", "scale.", "engine.url", "engine.api_key_env", "engine.retries", "engine.retry_s", "engine.first_token_s",
    "engine.stall_s",
)  # fmt: skip
"""Keys, or prefixes of keys, that a resumed run may change: none has an influence on what was trained so far."""


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
        """Returns the config that the run was started with."""
        return make_config(orjson.loads((self.path / "config.json").read_bytes())["config"], str(self.path / "config.json"))

    def discard_start(self) -> None:
        """Remove the config, so that the folder counts as not started."""
        (self.path / "config.json").unlink()

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one entry per training step; a line that a kill cut short is left out."""
        lines = _lines(self.path / "metrics.jsonl")
        return [orjson.loads(line) for line in lines if line.endswith(b"}\n")]

    def add_metrics(self, entry: dict[str, Any]) -> None:
        """Append the metrics of one step."""
        with (self.path / "metrics.jsonl").open("ab") as out:
            out.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))

    def keep_metrics(self, steps: int) -> list[dict[str, Any]]:
        """Drop the metrics of steps after `steps`, which a kill undid; returns those kept."""
        kept = [entry for entry in self.metrics() if entry["step"] <= steps]
        text = b"".join(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for entry in kept)
        write_file(self.path / "metrics.jsonl", text)
        return kept

    def evaluations(self) -> dict[str, float | None]:
        """Returns held-out rewards by time, such as `before-0` or `during-8`; None where one was skipped or failed."""
        file = self.path / "evals.json"
        return orjson.loads(file.read_bytes()) if file.exists() else {}

    def add_evaluation(self, when: str, reward: float | None) -> None:
        """Record a held-out reward, so that a resumed run does not measure it again."""
        write_file(self.path / "evals.json", orjson.dumps({**self.evaluations(), when: reward}))

    def keep_evaluations(self, steps: int) -> None:
        """Drop evaluations after `steps`, of weights that a kill undid."""
        kept = {when: reward for when, reward in self.evaluations().items() if int(when.rpartition("-")[2]) <= steps}
        if kept != self.evaluations():
            write_file(self.path / "evals.json", orjson.dumps(kept))

    def summary(self) -> bytes | None:
        """Returns the summary of when the run last ended, as JSON."""
        file = self.path / "summary.json"
        return file.read_bytes() if file.exists() else None

    def write_summary(self, summary: bytes) -> None:
        write_file(self.path / "summary.json", orjson.dumps(orjson.loads(summary), option=orjson.OPT_INDENT_2))


def open_run_folder(
    config: RunConfig, *, fresh: bool, may_change: tuple[str, ...] = MAY_CHANGE, files: Sequence[Path] = ()
) -> RunFolder:
    """Create the folder, or open the existing one; ConfigError if settings or files differ from those that it was started with.

    `may_change` are keys, or prefixes of keys, that may differ; `files` are compared besides the datasets.
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
    """Returns the folder of a run that was started; ConfigError if it is none."""
    try:
        settings: Any = orjson.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        settings = None
    if not (isinstance(settings, dict) and {"config", "datasets"} <= settings.keys()):  # a checkpoint has a config.json too
        raise ConfigError(f"{path}: not a run folder; give one that `penstock train` made, such as runs/multiply")
    return RunFolder(path, resumed=True)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Lock the run for this process; the system releases the lock when the process dies."""
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
    """Rename a run, with its tables if they are in a database elsewhere."""
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
