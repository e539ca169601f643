"""The checkpoints of a training run, as they lie in its folder: model folders that can be served or trained on."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.controller.home import Home
from penstock.controller.runs import Run, RunFiles, RunQueue
from penstock.errors import ControllerError
from penstock.models import list_cached
from penstock.models.pull import BUILT_IN

CHECKPOINTS, STATE = "checkpoints", "state.json"


class Checkpoint(NamedTuple):
    """Weights that a run saved."""

    name: str
    """`<run name>/step-<step>`."""
    run: Run
    step: int
    path: Path
    created_at: str
    reward: float | None
    """Mean of the training step that led to it, where it is known."""


def checkpoints_of(run: Run, results: Path) -> list[Checkpoint]:
    """The whole ones, the newest first; `results` is the run's own folder."""
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
    """How many steps led to it; None where a file is missing or cut short, as a kill leaves it."""
    try:
        state: dict[str, Any] = orjson.loads((folder / STATE).read_bytes())
        whole = all((folder / name).stat().st_size == size for name, size in state["files"].items())
        return int(state["version"]["step"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
            continue  # a line that a kill cut short, or a step without a reward
    return rewards


PAGE = 100


class PretrainedModel(NamedTuple):
    """A model that no run has trained."""

    name: str
    path: Path | None
    """None where it must be pulled first."""


class ModelCatalogue:
    """Reads folders as they are now: nothing of it is kept."""

    def __init__(self, runs: RunQueue, home: Home) -> None:
        self._runs = runs
        self._home = home

    def base(self) -> list[PretrainedModel]:
        """Models that are here, by name, then built-in ones that can be pulled."""
        here = [PretrainedModel(model.name, model.path) for model in list_cached()]
        names = {model.name for model in here}
        return here + [PretrainedModel(name, None) for name in BUILT_IN if name not in names]

    def trained(self) -> list[Checkpoint]:
        """Checkpoints of training runs that are over, newest run first, newest checkpoint first: none of them changes any more."""
        return [checkpoint for checkpoints in self._by_run() for checkpoint in checkpoints]

    def find(self, name: str) -> Checkpoint | PretrainedModel:
        """By name; a run's name stands for its newest checkpoint. ControllerError 404 where there is none."""
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
        """What `[model] name` takes for it: a checkpoint's folder, or the model's own name; None where it is neither."""
        try:
            found = self.find(name)
        except ControllerError:
            return None
        return str(found.path) if isinstance(found, Checkpoint) else found.name

    def _by_run(self, run_name: str | None = None) -> Iterator[list[Checkpoint]]:
        offset = 0
        while runs := self._runs.page("train", limit=PAGE, offset=offset)[0]:
            for run in runs:
                if run.status.over and run_name in (None, run.name):
                    yield checkpoints_of(run, RunFiles(self._home.runs / run.id).results(run))
            offset += PAGE
