"""Makes and mends workspaces: their folders, and rollouts that run as they are written."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from penstock.errors import ConfigError
from penstock.workspace.layout import DATASETS, WORD, Workspace
from penstock.workspace.texts import IGNORED, rollout_files

PLAIN = {"main.py": "multiply/agent.py"}
ABOUT = "An agent that multiplies with a tool, written with a plain `openai` client"


def make_workspace(folder: Path) -> Workspace:
    """`folder` as a workspace; what is there stays."""
    fix(folder)
    return Workspace(folder.resolve())


def missing(folder: Path) -> list[str]:
    """What keeps `folder` from being a workspace."""
    return Workspace(folder).missing()


def fix(folder: Path) -> list[str]:
    """Make the folders that are missing, and say which; ConfigError where one cannot be made."""
    made = missing(folder)
    for name in made:
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
            if not any((folder / name).iterdir()):
                (folder / name / ".gitkeep").touch()  # git keeps no empty folders
        except OSError as cause:
            raise ConfigError(f"{folder / name}: cannot be made: {cause.strerror}; see what is there, and who may write") from cause
    return made


def init_rollout(workspace: Workspace, name: str, force: bool = False) -> list[Path]:
    """Write rollouts/NAME, its experiment files and its tasks; with `force`, over all of these but tasks. The files, in order."""
    check_name(name)
    files = rollout_files(name, about=ABOUT, code=PLAIN)
    if force:
        files = {path: text for path, text in files.items() if not (path.startswith(DATASETS) and (workspace.path / path).exists())}
    return write_files(workspace.path, files, force=force)


def check_name(name: str) -> None:
    """ConfigError where no rollout may be called so."""
    if not WORD.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a rollout; use letters, digits, '.', '_' and '-', a letter or digit first")


def write_files(folder: Path, files: Mapping[str, str], *, force: bool = False) -> list[Path]:
    """Write all or none of them; ConfigError names what is in the way. `force` writes over files."""
    paths = {folder / path: text for path, text in files.items()}
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise ConfigError(f"{there[0]} is there already and stays; give another folder or name, or --force")
    new = {parent for path in paths for parent in path.parents if not parent.exists()}
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as cause:
        _remove([path for path in paths if path not in there], new)
        raise ConfigError(f"{cause.filename or folder}: cannot be written: {cause.strerror}; give another folder") from cause
    return list(paths)


def _remove(files: Iterable[Path], folders: Iterable[Path]) -> None:
    """Take back what was written, as far as that can be done."""
    for path in files:
        with suppress(OSError):
            path.unlink()
    for path in sorted(folders, key=lambda folder: -len(folder.parts)):
        with suppress(OSError):
            path.rmdir()


def write_ignored(folder: Path) -> None:
    """Say what git need not keep, where nobody has said it yet."""
    file = folder / ".gitignore"
    if not file.exists():
        file.write_text(IGNORED, encoding="utf-8")
