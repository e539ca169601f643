"""What a command works with: its workspace, the identity of the code, and the controller."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osmosis_ai.cli.logins import saved_login
from osmosis_ai.cli.output import CliError
from penstock.controller.client import ControllerClient


@dataclass(frozen=True, slots=True)
class Git:
    """The identity of a workspace's code."""

    identity: str
    """`owner/name`, or `local/<folder>` without a remote."""
    remote_url: str | None

    def as_json(self) -> dict[str, Any]:
        return {"identity": self.identity, "remote_url": self.remote_url}


@dataclass(frozen=True, slots=True)
class Connection:
    """A workspace and its controller."""

    client: ControllerClient
    git: Git
    workspace: Path

    @property
    def where(self) -> dict[str, Any]:
        """The fields that every result contains."""
        return {"git": self.git.as_json(), "workspace_directory": str(self.workspace)}


def connect() -> Connection:
    """Connects from the working directory. Starts a local controller unless OSMOSIS_PLATFORM_URL names one."""
    workspace = require_workspace()
    git = identify(workspace)
    return Connection(open_client(git.identity), git, workspace)


def require_workspace(start: Path | None = None) -> Path:
    """Returns the workspace that contains `start`. Raises WORKSPACE_REQUIRED, naming the missing folders."""
    from penstock.workspace.layout import Workspace, find_workspace

    here = (start or Path()).resolve()
    if (found := find_workspace(here)) is not None:
        return found.path
    missing = ", ".join(f"{name}/" for name in Workspace(here).missing())
    text = f"{here} is in no workspace: there is no {missing}"
    raise CliError(f"{text}; go to one, or make this one with: osmosis doctor --fix", "WORKSPACE_REQUIRED")


def identify(workspace: Path) -> Git:
    """Identifies the workspace by its git remote `origin`, on any host."""
    asked = subprocess.run(["git", "remote", "get-url", "origin"], cwd=workspace, capture_output=True, text=True, check=False)
    remote = asked.stdout.strip() if asked.returncode == 0 else ""
    path = re.sub(r"^[a-z+]+://[^/]+|^[^/@]+@[^:/]+:", "", remote).removesuffix("/").removesuffix(".git")
    names = [name for name in path.split("/") if name]
    if len(names) < 2:
        return Git(f"local/{_word(workspace.name)}", remote or None)
    return Git("/".join(map(_word, names[-2:])), _without_password(remote))


def open_client(git: str | None = None) -> ControllerClient:
    """Opens the controller of OSMOSIS_PLATFORM_URL, or else the local one."""
    url = platform_url()
    if url is None:
        from penstock.controller.local import find_controller

        client = find_controller()
        client.git = git
        return client
    login = saved_login(url)
    token = os.environ.get("OSMOSIS_TOKEN") or (login.token if login else None)
    if not token:
        raise CliError(f"Not logged in at {url}; run: osmosis auth login, or set OSMOSIS_TOKEN")
    return ControllerClient(url, token, git)


def platform_url() -> str | None:
    """Returns OSMOSIS_PLATFORM_URL, or None if it is not set."""
    return (os.environ.get("OSMOSIS_PLATFORM_URL") or "").strip().rstrip("/") or None


def _word(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "workspace"


def _without_password(remote: str) -> str:
    return re.sub(r"(?<=://)[^/@]+@", "", remote)
