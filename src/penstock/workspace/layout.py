"""Layout of a workspace: the folders of rollouts, experiment files and datasets. It needs no git."""

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, DatasetError

ROLLOUTS, EVALS, TRAININGS, DATASETS = "rollouts", "configs/eval", "configs/training", "data"
FOLDERS = (ROLLOUTS, EVALS, TRAININGS, DATASETS)
DATASET_SUFFIXES = (".jsonl", ".csv", ".parquet")
ROLLOUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Valid names of rollouts."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder that contains FOLDERS."""

    path: Path

    def rollouts(self) -> list[str]:
        """Returns the folders under rollouts/ that contain Python files, sorted."""
        folder = self.path / ROLLOUTS
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted(each.name for each in found if each.is_dir() and not each.name.startswith(".") and any(each.glob("*.py")))

    def missing(self) -> list[str]:
        """Returns the folders of the layout that do not exist."""
        return [name for name in FOLDERS if not (self.path / name).is_dir()]

    def dataset(self, name: str) -> Path:
        """Returns a dataset's file: data/NAME with a known suffix, or a path; DatasetError lists the datasets that exist."""
        named = [self.path / DATASETS / f"{name}{ending}" for ending in DATASET_SUFFIXES]
        paths = [Path(name).expanduser(), self.path / name, self.path / DATASETS / name]
        found = [path for path in named if path.is_file()] or [
            path for path in paths if path.suffix in DATASET_SUFFIXES and path.is_file()
        ]
        if len(found) > 1 and found[0] in named:
            names = ", ".join(path.name for path in found)
            raise DatasetError(f"experiment.dataset = {name!r} is several files: {names}; write the one with its ending")
        if found:
            return found[0].resolve()
        existing = sorted(path.stem for path in (self.path / DATASETS).glob("*") if path.suffix in DATASET_SUFFIXES)
        known = f"there are {', '.join(existing)}" if existing else "there is none yet"
        raise DatasetError(f"experiment.dataset = {name!r}: no {DATASETS}/{name}.jsonl, .csv or .parquet; {known}")


def find_workspace(start: Path) -> Workspace | None:
    """Returns the nearest workspace from `start` upwards; None if there is none."""
    here = start.resolve()
    for folder in (here, *here.parents):
        workspace = Workspace(folder)
        if not workspace.missing():
            return workspace
    return None


def workspace_of(start: Path) -> Workspace:
    """Returns the nearest workspace from `start` upwards; ConfigError if there is none."""
    found = find_workspace(start)
    if found is None:
        text = f"{start}: not inside a workspace, a folder with {', '.join(f'{name}/' for name in FOLDERS)}"
        raise ConfigError(f"{text}; make what is missing with: penstock doctor --fix")
    return found
