"""Models that the controller knows: checkpoints of training runs, and pretrained models in the local cache."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.engines.checkpoint_files import STATE, is_complete, read_state
from penstock.errors import ControllerError
from penstock.models import list_cached
from penstock.models.pull import BUILT_IN
from penstock_controller.home import Home
from penstock_controller.runs import Run, RunFiles, RunQueue

CHECKPOINTS = "checkpoints"
PAGE_RUNS = 100


class Checkpoint(NamedTuple):
    """A checkpoint of a training run: a model folder that can be served or trained further."""

    name: str
    """`<run name>/step-<step>`."""
    run: Run
    step: int
    path: Path
    created_at: str
    reward: float | None
    """Mean reward of the training step before it; None if unknown."""


class PretrainedModel(NamedTuple):
    name: str
    path: Path | None
    """None if it is not pulled yet."""


class ModelCatalogue:
    """Lists and finds models. Reads the disk on every call."""

    def __init__(self, runs: RunQueue, home: Home) -> None:
        self._runs = runs
        self._home = home

    def base(self) -> list[PretrainedModel]:
        """Returns pulled models, then built-in ones that can be pulled."""
        here = [PretrainedModel(model.name, model.path) for model in list_cached()]
        names = {model.name for model in here}
        return here + [PretrainedModel(name, None) for name in BUILT_IN if name not in names]

    def trained(self) -> list[Checkpoint]:
        """Returns the checkpoints of ended training runs, newest run first, then newest checkpoint first."""
        return [checkpoint for checkpoints in self._by_run() for checkpoint in checkpoints]

    def find(self, name: str) -> Checkpoint | PretrainedModel:
        """Returns a model by name; a run's name means its newest checkpoint. ControllerError 404 if there is none."""
        for checkpoints in self._by_run(name.rpartition("/step-")[0] or name):
            for checkpoint in checkpoints:
                if name in (checkpoint.name, checkpoint.run.name):
                    return checkpoint
        for model in self.base():
            if model.name == name:
                return model
        text = f"there is no model {name[:200]!r}; see: penstock model list"
        raise ControllerError(text, code="MODEL_NOT_FOUND", status=404)

    def resolve(self, name: str) -> str | None:
        """Returns the value for `[model] name`: a checkpoint's folder or a pretrained model's name; None for an unknown name."""
        try:
            found = self.find(name)
        except ControllerError:
            return None
        return str(found.path) if isinstance(found, Checkpoint) else found.name

    def _by_run(self, run_name: str | None = None) -> Iterator[list[Checkpoint]]:
        offset = 0
        while runs := self._runs.page("train", limit=PAGE_RUNS, offset=offset)[0]:
            for run in runs:
                if run.status.is_final and run_name in (None, run.name):
                    yield checkpoints_of(run, RunFiles(self._home.runs / run.id).results(run))
            offset += PAGE_RUNS


def checkpoints_of(run: Run, results: Path) -> list[Checkpoint]:
    """Returns the complete checkpoints in the run folder `results`, newest first."""
    rewards = _rewards(results / "metrics.jsonl")
    found: list[Checkpoint] = []
    for folder in (results / CHECKPOINTS).glob("*"):
        step = _step(folder) if folder.name.isdecimal() else None
        if step is not None:
            saved = datetime.fromtimestamp((folder / STATE).stat().st_mtime, UTC)
            moment = saved.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            found.append(Checkpoint(f"{run.name}/step-{step}", run, step, folder, moment, rewards.get(step)))
    return sorted(found, key=lambda each: (each.step, each.path.name), reverse=True)


def _step(folder: Path) -> int | None:
    """Returns the checkpoint's step; None if a file is missing or truncated, as after a kill."""
    return read_state(folder).version.step if is_complete(folder) else None


def _rewards(file: Path) -> dict[int, float]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return {}
    rewards: dict[int, float] = {}
    for line in lines:
        try:
            entry: dict[str, Any] = orjson.loads(line)
            rewards[int(entry["step"])] = float(entry["reward"])
        except (ValueError, KeyError, TypeError):
            continue  # a truncated line, or a step without a reward
    return rewards
