"""Repositories on the controller's machine, registered as owner/name: the source of code for submissions without a snapshot."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ControllerError
from penstock_controller.database import ControllerDatabase
from penstock_controller.runs import now

TABLE = """CREATE TABLE IF NOT EXISTS repositories (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, path TEXT NOT NULL, created_at TEXT NOT NULL)"""
NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9_-])?/[a-z0-9._-]{0,99}[a-z0-9_-]")
FOLDERS = ("rollouts", "configs/eval", "configs/training", "data")
"""Folders that a workspace outside of git must have."""
GIT_TIMEOUT_S = 30.0
"""For one git command."""


class Repository(NamedTuple):
    """A registered repository."""

    name: str
    """owner/name, lower case."""
    path: Path
    created_at: str


class RolloutListing(NamedTuple):
    """The rollouts of a repository at one commit."""

    names: list[str]
    commit_sha: str | None
    """None if the folder is not under git."""
    committed_at: str | None


class Repositories:
    def __init__(self, database: ControllerDatabase) -> None:
        self._database = database
        database.create(TABLE)

    def register(self, name: str, path: Path) -> Repository:
        """Registers the folder `path` as `name`, replacing an earlier one; ControllerError 400 if either is invalid."""
        name = check_name(name)
        folder = _check_path(path)
        statement = "INSERT INTO repositories (name, path, created_at) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET path = ?"
        self._database.write(statement, [name, str(folder), now(), str(folder)])
        return self.find(name)

    def get(self, name: str) -> Path:
        return self.find(name).path

    def find(self, name: str) -> Repository:
        """Returns the repository of this name; ControllerError 404 if there is none, 409 if its folder is gone."""
        found = self._database.row("SELECT name, path, created_at FROM repositories WHERE name = ?", [name.lower()])
        if found is None:
            text = f"repository {name!r} is not known to this controller; on its machine run: penstock controller register"
            raise ControllerError(f"{text} PATH --name {name.lower()}", code="REPOSITORY_UNKNOWN", status=404)
        known = Repository(found["name"], Path(found["path"]), found["created_at"])
        if not known.path.is_dir():
            text = f"repository {known.name!r} is registered at {known.path}, which is gone; register it where it is now"
            raise ControllerError(text, code="REPOSITORY_GONE", status=409)
        return known

    def page(self, *, limit: int = 50, offset: int = 0) -> tuple[list[Repository], int]:
        """Returns a page of repositories, newest first, and the total count."""
        statement = "SELECT name, path, created_at FROM repositories ORDER BY seq DESC LIMIT ? OFFSET ?"
        found = [
            Repository(row["name"], Path(row["path"]), row["created_at"]) for row in self._database.rows(statement, [limit, offset])
        ]
        return found, self._database.rows("SELECT count(*) FROM repositories")[0][0]

    def rollouts(self, name: str, *, branch: str | None = None) -> RolloutListing:
        """Returns the folders under `rollouts/` at HEAD or at the tip of a branch. Waits for git: call it in a thread."""
        path = self.get(name)
        if not _is_git(path):
            return RolloutListing(_folders(path) if branch is None else _unknown_branch(name, branch), None, None)
        tip = _tip(path, branch)
        if tip is None:  # without a branch, the repository has no commit yet
            return RolloutListing(_unknown_branch(name, branch) if branch is not None else [], None, None)
        commit, _, committed_at = tip.strip().partition(" ")
        listed = _git(path, "ls-tree", "-d", "-z", "--name-only", f"{commit}:rollouts")
        names = [entry for entry in (listed or "").split("\0") if entry and not entry.startswith((".", "_"))]
        return RolloutListing(sorted(names), commit, committed_at or None)


def check_name(name: str) -> str:
    """Returns `name` in lower case; ControllerError 400 if it is no owner/name."""
    lower = name.lower()
    if not NAME.fullmatch(lower):
        text = f"{name[:120]!r} is not the name of a repository; write it as owner/name, such as acme/agents"
        raise ControllerError(text, code="REPOSITORY_INVALID", status=400, details={"field": "name"})
    return lower


def _check_path(path: Path) -> Path:
    folder = path.expanduser()
    why = ""
    if not folder.is_absolute():
        why = "is not an absolute path"
    elif not folder.is_dir():
        why = "is no folder on the controller's machine"
    elif not _is_git(folder) and (missing := [name for name in FOLDERS if not (folder / name).is_dir()]):
        why = f"is neither a git repository nor a workspace: it has no {missing[0]}/"
    if why:
        raise ControllerError(f"{folder} {why}", code="REPOSITORY_INVALID", status=400, details={"field": "path"})
    return folder.resolve()


def _is_git(path: Path) -> bool:
    """Whether `path` is the top folder of a work tree, or a bare repository."""
    output = _git(path, "rev-parse", "--is-bare-repository", "--show-prefix")
    bare, _, prefix = (output or "").partition("\n")
    return bare == "true" or (bare == "false" and not prefix.strip())


def _tip(path: Path, branch: str | None) -> str | None:
    """Returns "COMMIT DATE" of HEAD or of a local or remote-tracking branch; None if there is none."""
    if branch is not None and (not branch or set(branch) & set(" ~^:?*[\\\0\n")):
        return None
    refs = ("HEAD",) if branch is None else (f"refs/heads/{branch}", f"refs/remotes/origin/{branch}")
    return next((tip for ref in refs if (tip := _git(path, "log", "-1", "--format=%H %cI", ref, "--"))), None)


def _unknown_branch(name: str, branch: str) -> list[str]:
    text = f"repository {name!r} has no branch {branch[:120]!r} on the controller's machine; fetch it there, or leave it out"
    raise ControllerError(text, code="BRANCH_UNKNOWN", status=404, details={"field": "branch"})


def _folders(path: Path) -> list[str]:
    folder = path / "rollouts"
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(each.name for each in found if each.is_dir() and not each.name.startswith((".", "_")))


def _git(path: Path, *arguments: str) -> str | None:
    """Returns git's output; None if it fails."""
    command = ["git", "-C", str(path), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise ControllerError(f"git cannot be asked about {path}: {cause}", code="GIT_FAILED", status=503) from cause
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
