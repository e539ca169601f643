"""Which runs are shown: one run, or all below a folder. A run's id is its path below that folder."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from penstock.errors import ConfigError, RequestError
from penstock.view.run_files import RUN_NAMES, ViewedRun, is_run, open_viewed_run

MAX_RUNS = 500
"""Runs in the list; the newest ones."""
MAX_FOLDERS = 20_000
"""Folders that are looked at to find them."""
MAX_DEPTH = 4
MAX_OPEN = 32
"""Runs whose metrics are kept in memory."""
SKIPPED = frozenset({"checkpoints", "artifacts", "served", "scores", "node_modules", ".git", ".venv", "__pycache__"})


class RunPlace(NamedTuple):
    id: str
    path: Path
    label: Mapping[str, Any] = MappingProxyType({})
    """What is known of the run besides its folder."""
    is_ours: bool = True
    """Whether its files were written by code of ours alone. Of others, no link is followed and no database address used."""


class RunSource(Protocol):
    def places(self) -> list[RunPlace]:
        """The runs to show, in any order."""
        ...

    def find(self, run_id: str) -> RunPlace:
        """The run with this id; RequestError 404 if it is not shown."""
        ...


class FolderSource:
    """All runs below `root`; or only one of them."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(f"{path}: no such folder; give a run folder such as runs/multiply, or a folder of runs")
        single = is_run(path)
        self._root, self._only = (path.resolve().parent, path.resolve().name) if single else (path.resolve(), None)

    @property
    def only(self) -> str | None:
        """The id of the run if a single one is shown."""
        return self._only

    def places(self) -> list[RunPlace]:
        if self._only is not None:
            return [RunPlace(self._only, self._root / self._only)]
        return [RunPlace(path.relative_to(self._root).as_posix(), path) for path in _run_folders(self._root)]

    def find(self, run_id: str) -> RunPlace:
        parts = run_id.split("/")
        allowed = run_id == self._only if self._only is not None else not {"", ".", ".."}.intersection(parts)
        path = self._root / run_id if allowed and "\x00" not in run_id else None
        if path is None or len(parts) > MAX_DEPTH or not _is_inside(path, self._root) or not is_run(path):
            raise unknown_run(run_id)
        return RunPlace(run_id, path)


def unknown_run(run_id: str) -> RequestError:
    return RequestError(f"no run {run_id[:100]!r} here; go back to the list of runs", status=404, code="unknown_run")


class OpenRuns:
    """The runs of a source, with what was read of each; the least recently asked for are forgotten."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._open: OrderedDict[Path, ViewedRun] = OrderedDict()

    def get(self, run_id: str) -> ViewedRun:
        place = self.source.find(run_id)
        try:
            return self.open(place)
        except ConfigError as error:
            raise RequestError(str(error), status=404, code="unknown_run") from error

    def open(self, place: RunPlace) -> ViewedRun:
        """Returns the files of a run, up to date."""
        path = place.path
        if not place.is_ours and has_links(path):
            raise ConfigError(f"{place.id}: its folder has links in place of files, so it is not shown")
        stamp = _stamp(path)
        known = self._open.get(path)
        if known is None or known.stamp != stamp:
            known = open_viewed_run(path)
            known.stamp, known.is_ours = stamp, place.is_ours
        known.refresh()
        self._open[path] = known
        self._open.move_to_end(path)
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return known


def has_links(path: Path) -> bool:
    """Whether a file that is read here is a link, by which a run's code could show files of others."""
    names = ("", *RUN_NAMES, "checkpoints", "artifacts", "scores")
    found = [*path.glob("checkpoints/*"), *path.glob("checkpoints/*/token*"), *path.glob("scores/*")]
    return any((path / name).is_symlink() for name in names) or any(each.is_symlink() for each in found)


def _stamp(path: Path) -> int:
    try:
        return (path / "config.json").stat().st_mtime_ns
    except OSError:
        return 0


def _is_inside(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, ValueError):
        return False


def _run_folders(root: Path) -> list[Path]:
    found = sorted(_walk(root, MAX_DEPTH, [MAX_FOLDERS]), key=_age, reverse=True)
    return found[:MAX_RUNS]


def _walk(folder: Path, depth: int, left: list[int]) -> Iterator[Path]:
    try:
        children = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False) and entry.name not in SKIPPED]
    except OSError:
        return
    for child in children:
        left[0] -= 1
        if left[0] < 0:
            return
        path = Path(child.path)
        if is_run(path):
            yield path
        elif depth > 1 and not child.name.startswith("."):
            yield from _walk(path, depth - 1, left)


def _age(path: Path) -> float:
    for name in ("events.jsonl", "config.json", "pool.db"):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
