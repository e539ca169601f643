"""Isolation of submitted code: in the sandbox it sees its own run, and nothing else of the controller's folder.

Code that the owner has submitted sees all else that the owner's programs see. Another's sees a machine that it cannot change, with
empty folders in place of the user's home and /tmp.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from pwd import getpwuid

import penstock
from penstock.config import cache_folder
from penstock.system.sandbox import Sandbox, SandboxName, SandboxWish, choose_sandbox

SANDBOXES: tuple[SandboxName, ...] = ("bubblewrap",)
"""Not `user`: another user could not reach a run inside the controller's private folder."""
VIRTUAL_FOLDERS = frozenset({"proc", "dev", "sys"})
"""Top folders that the sandbox mounts itself."""
HIDDEN = (
    "/tmp", "/var/tmp", "/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/run/user", "/run/dbus",
    "/run/docker.sock", "/run/containerd", "/run/podman", "/run/crio", "/run/libvirt", "/run/systemd/private",
)  # fmt: skip
"""Others' temporary files, passwords, and services that would act for the controller's user, such as a keyring or Docker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIsolation:
    """How the code of one run is started."""

    sandbox: Sandbox
    home: Path
    """The controller's folder."""
    trusted: bool
    """Whether the owner has submitted it."""
    readonly: tuple[Path, ...] = ()
    """What the run reads inside the controller's folder."""
    writable: tuple[Path, ...] = ()
    """What it may change."""

    def command(self, argv: list[str]) -> list[str]:
        """Returns the command that starts `argv` in the sandbox."""
        if self.trusted:
            return self.sandbox.command(argv, hidden=[self.home], readonly=self.readonly, writable=self.writable).argv
        hidden = [path for path in (self.home, *_user_homes(), *map(Path, HIDDEN)) if path != Path("/")]
        machine = [path for path in (*_machine(), *program_folders(), *_model_caches()) if path not in hidden]
        return self.sandbox.command(argv, hidden=hidden, readonly=[*machine, *self.readonly], writable=self.writable).argv


def choose_isolation(wish: SandboxWish) -> Sandbox:
    """Returns the sandbox for submitted code; ConfigError if the machine lacks what `wish` names."""
    return choose_sandbox(wish, auto=SANDBOXES)


def describe_isolation(sandbox: Sandbox) -> str:
    """Returns in one sentence whom the owner trusts with what."""
    if sandbox.isolates:
        return f"submitted code runs in a sandbox ({sandbox.name}), apart from this controller's keys, secrets and other runs"
    text = f"submitted code runs without a sandbox ({sandbox.reason}): it can read this controller's token, keys and secrets"
    return f"{text}, so whoever may submit is trusted like the owner"


def program_folders() -> list[Path]:
    """Returns the folders of the interpreter and of everything that it imports, penstock among them."""
    named = [sys.prefix, sys.base_prefix, *sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = {Path(name) for name in named if name} | {Path(next(iter(penstock.__path__))).parent}
    return [path for path in found if path.is_absolute() and not any(home.is_relative_to(path) for home in _user_homes())]


def is_checkpoint(path: Path, runs: Path) -> bool:
    """Whether `path` is a folder of weights that a run made, `<runs>/<id>/out/<name>/checkpoints/<version>`, and no link."""
    inside = path.relative_to(runs).parts if path.is_relative_to(runs) else ()
    return path.resolve() == path and inside[1:2] == ("out",) and inside[-2:-1] == ("checkpoints",) and path.is_dir()


def _user_homes() -> list[Path]:
    """Returns the home folder of this user, as the environment and as the system's list of users has it."""
    return [Path.home(), Path(getpwuid(os.geteuid()).pw_dir)]


def _machine() -> list[Path]:
    """Returns the folders of the machine's files."""
    return [path for path in Path("/").iterdir() if path.name not in VIRTUAL_FOLDERS and path.is_dir() and not path.is_symlink()]


def _model_caches() -> list[Path]:
    """Returns where the controller's user keeps models, without the tokens in the same place."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return [cache_folder(), Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser() / "hub"]
