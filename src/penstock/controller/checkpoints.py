"""The checkpoints of a training run, as they lie in its folder: model folders that can be served or trained on."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.controller.runs import Run

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
