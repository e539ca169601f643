"""The folder of a controller: its database, its token, its runs, and how to reach it."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.system.files import create_private


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under one folder; readable by the owner alone."""

    path: Path

    @property
    def database(self) -> Path:
        """Runs, datasets, secrets, repositories and deployments."""
        return self.path / "controller.db"

    @property
    def lock(self) -> Path:
        """Held by the controller that serves this folder; it dies with the process."""
        return self.path / "controller.lock"

    @property
    def address(self) -> Path:
        """JSON with `url` and `pid` of the controller that serves, written once it does."""
        return self.path / "controller.json"

    @property
    def log(self) -> Path:
        """What a controller in the background says."""
        return self.path / "controller.log"

    @property
    def runs(self) -> Path:
        """One folder for each run, named by its id."""
        return self.path / "runs"

    @property
    def snapshots(self) -> Path:
        """Code as it was submitted: `<sha256>.tar.gz`."""
        return self.path / "snapshots"

    @property
    def datasets(self) -> Path:
        """Uploaded files by their digest."""
        return self.path / "datasets"

    @property
    def environments(self) -> Path:
        """Python environments of rollouts with requirements of their own, by the digest of those."""
        return self.path / "environments"

    def make(self) -> "Home":
        """The folder itself; ConfigError where it cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in (self.runs, self.snapshots, self.datasets, self.environments):
                folder.mkdir(exist_ok=True)
        except OSError as cause:
            text = f"{self.path}: the controller's folder cannot be made: {cause.strerror}"
            raise ConfigError(f"{text}; set PENSTOCK_HOME to a writable place") from cause
        return self

    def token(self) -> str:
        """What callers must show; made once."""
        return self.secret("token").decode()

    def secret(self, name: str) -> bytes:
        """A random word of this controller's own, in a file that only its owner can read; made once."""
        file = self.path / name
        if not file.exists():
            create_private(file, secrets.token_urlsafe(32).encode())
        return file.read_bytes()


def default_home() -> Home:
    """$PENSTOCK_HOME, else in the user's state folder."""
    if chosen := os.environ.get("PENSTOCK_HOME"):
        return Home(Path(chosen).expanduser())
    return Home(Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "penstock")
