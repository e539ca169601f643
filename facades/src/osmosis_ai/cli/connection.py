"""Where a command works: the workspace around it, the name its code goes by, and the controller it talks to."""

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
    """What the code of a workspace is known by."""

    identity: str
    """`owner/name`; `local/<folder>` without a remote."""
    remote_url: str | None

    def as_json(self) -> dict[str, Any]:
        """As envelopes tell it."""
        return {"identity": self.identity, "remote_url": self.remote_url}


@dataclass(frozen=True, slots=True)
class Connection:
    """A workspace and the controller that its commands talk to."""

    client: ControllerClient
    git: Git
    workspace: Path

    @property
    def where(self) -> dict[str, Any]:
        """What every result tells beside its own fields."""
        return {"git": self.git.as_json(), "workspace_directory": str(self.workspace)}


def connect() -> Connection:
    """From the working directory; a local controller is started where no other is named."""
    workspace = require_workspace()
    git = identify(workspace)
    return Connection(open_client(git.identity), git, workspace)


def require_workspace(start: Path | None = None) -> Path:
    """The workspace around `start`; WORKSPACE_REQUIRED tells what is missing."""
    from penstock.workspace.layout import Workspace, find_workspace

    here = (start or Path()).resolve()
    if (found := find_workspace(here)) is not None:
        return found.path
    missing = ", ".join(f"{name}/" for name in Workspace(here).missing())
    text = f"{here} is in no workspace: there is no {missing}"
    raise CliError(f"{text}; go to one, or make this one with: osmosis doctor --fix", "WORKSPACE_REQUIRED")


def identify(workspace: Path) -> Git:
    """By its `origin`, on whatever host that is."""
    asked = subprocess.run(["git", "remote", "get-url", "origin"], cwd=workspace, capture_output=True, text=True, check=False)
    remote = asked.stdout.strip() if asked.returncode == 0 else ""
    path = re.sub(r"^[a-z+]+://[^/]+|^[^/@]+@[^:/]+:", "", remote).removesuffix("/").removesuffix(".git")
    names = [name for name in path.split("/") if name]
    if len(names) < 2:
        return Git(f"local/{_word(workspace.name)}", remote or None)
    return Git("/".join(map(_word, names[-2:])), _without_password(remote))


def open_client(git: str | None = None) -> ControllerClient:
    """The controller of OSMOSIS_PLATFORM_URL, else the local one."""
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
    """The controller that the environment names."""
    return (os.environ.get("OSMOSIS_PLATFORM_URL") or "").strip().rstrip("/") or None


def _word(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "workspace"


def _without_password(remote: str) -> str:
    return re.sub(r"(?<=://)[^/@]+@", "", remote)
