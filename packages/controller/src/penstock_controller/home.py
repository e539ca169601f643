"""The controller's home folder: paths of its database, lock, address file and run folders, and its key files."""

from dataclasses import dataclass
from pathlib import Path

from penstock.config import home_folder
from penstock.errors import ConfigError
from penstock.system.files import load_key

KEY_FILES = {
    "token": "start the controller again; take the new token from `penstock controller token`",
    "vault.key": "set all secrets again",
    "links": "start the controller again; links that it gave out end",
    "deployments.key": "start the controller again; deployed models get new tokens",
}
"""The files with keys, and what must be done after one was removed."""


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under the home folder, which only its owner can read."""

    path: Path

    @property
    def database(self) -> Path:
        """SQLite file with runs, datasets, secrets, repositories and deployments."""
        return self.path / "controller.db"

    @property
    def lock(self) -> Path:
        """Locked by the controller that serves this folder; the kernel releases the lock when the process ends."""
        return self.path / "controller.lock"

    @property
    def address(self) -> Path:
        """JSON with `url` and `pid` of the serving controller; written when it starts to serve."""
        return self.path / "controller.json"

    @property
    def log(self) -> Path:
        """Output of a controller that runs in the background."""
        return self.path / "controller.log"

    @property
    def runs(self) -> Path:
        """One folder per run, named by the run's id."""
        return self.path / "runs"

    @property
    def snapshots(self) -> Path:
        """Submitted code: `<sha256>.tar.gz`."""
        return self.path / "snapshots"

    @property
    def datasets(self) -> Path:
        """Uploaded dataset files, named by their SHA-256."""
        return self.path / "datasets"

    @property
    def environments(self) -> Path:
        """Virtual environments, named by a digest of their requirements."""
        return self.path / "environments"

    def create(self) -> "Home":
        """Creates the folders and returns self; ConfigError if that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in (self.runs, self.snapshots, self.datasets, self.environments):
                folder.mkdir(exist_ok=True)
        except OSError as cause:
            text = f"{self.path}: the controller's folder cannot be made: {cause.strerror}"
            raise ConfigError(f"{text}; set PENSTOCK_HOME to a writable place") from cause
        return self

    def token(self) -> str:
        """Returns the owner's API token; generates it on first use."""
        return self.key("token").decode()

    def key(self, name: str) -> bytes:
        """Returns the key in the file `name`, one of KEY_FILES; generates it on first use. ConfigError if it is damaged."""
        return load_key(self.path / name, loss=KEY_FILES[name], text=True)


def default_home() -> Home:
    """Returns $PENSTOCK_HOME, else a folder in the user's state directory."""
    return Home(home_folder())
