"""Where a workspace's things are: rollouts, experiment files, datasets. Git is not needed."""

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, DatasetError

ROLLOUTS, EVALS, TRAININGS, DATASETS = "rollouts", "configs/eval", "configs/training", "data"
FOLDERS = (ROLLOUTS, EVALS, TRAININGS, DATASETS)
DATASET_SUFFIXES = (".jsonl", ".csv", ".parquet")
ROLLOUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""What a rollout may be called."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder with the four folders in it."""

    path: Path

    def rollouts(self) -> list[str]:
        """Names of the folders under rollouts/ that hold Python files, in order."""
        folder = self.path / ROLLOUTS
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted(each.name for each in found if each.is_dir() and not each.name.startswith(".") and any(each.glob("*.py")))

    def missing(self) -> list[str]:
        """Folders of the layout that are not there."""
        return [name for name in FOLDERS if not (self.path / name).is_dir()]

    def dataset(self, name: str) -> Path:
        """The file of a dataset: data/NAME with one of the known endings, or a path; DatasetError names what there is."""
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
        there = sorted(path.stem for path in (self.path / DATASETS).glob("*") if path.suffix in DATASET_SUFFIXES)
        known = f"there are {', '.join(there)}" if there else "there is none yet"
        raise DatasetError(f"experiment.dataset = {name!r}: no {DATASETS}/{name}.jsonl, .csv or .parquet; {known}")


def find_workspace(start: Path) -> Workspace | None:
    """The nearest folder with all four, from `start` upwards."""
    here = start.resolve()
    for folder in (here, *here.parents):
        workspace = Workspace(folder)
        if not workspace.missing():
            return workspace
    return None


def workspace_of(start: Path) -> Workspace:
    """The same; ConfigError where there is none."""
    found = find_workspace(start)
    if found is None:
        text = f"{start}: not inside a workspace, a folder with {', '.join(f'{name}/' for name in FOLDERS)}"
        raise ConfigError(f"{text}; make what is missing with: penstock doctor --fix")
    return found
