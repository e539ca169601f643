"""The two small files between a controller and its run monitors: job.json (what to start) and exit.json (how it ended)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

import orjson

from penstock.controller.runs import RunFiles, now
from penstock.system.files import write_file
from penstock.system.sandbox import SandboxWish

INHERITED_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH",
    "PENSTOCK_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
"""Variables that a run inherits from the controller, besides `LC_*`: locations and settings, no credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """The process that a monitor starts. Holds no secrets."""

    argv: list[str]
    """The interpreter comes first; it is replaced if the project needs its own virtual environment."""
    cwd: str
    env: dict[str, str] = field(default_factory=dict[str, str])
    stop_grace_s: float = 60.0
    """Time between SIGINT and SIGKILL."""
    project: str = ""
    """Folder whose pyproject.toml lists requirements; empty if there are none."""
    environments: str = ""
    """Folder of the virtual environments."""
    log_mb: float = 256.0
    """Limit of the log file; further lines are dropped."""
    sandbox: SandboxWish = "auto"
    """The sandbox that the submission was accepted for."""
    trusted: bool = True
    """Whether the owner has submitted it."""
    checkpoint: str = ""
    """Folder of another run's weights that it begins with; empty if there is none."""

    @classmethod
    def read(cls, files: RunFiles) -> Self:
        return cls(**orjson.loads(files.job.read_bytes()))

    def write(self, files: RunFiles) -> None:
        write_file(files.job, orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How a run's process ended."""

    code: int
    """Exit code; negative is the signal that ended it."""
    stopped: bool
    """Whether the stop was requested."""
    message: str = ""
    """Why it failed: the last output line that looks like an error. Empty if it succeeded or was stopped."""
    ended_at: str = field(default_factory=now)

    @classmethod
    def read(cls, files: RunFiles) -> Self | None:
        """Returns None if the process has not ended."""
        try:
            return cls(**orjson.loads(files.end.read_bytes()))
        except FileNotFoundError:
            return None

    def write(self, files: RunFiles) -> None:
        """Marks the run as ended."""
        write_file(files.end, orjson.dumps(asdict(self)))


def process_environment(inherited_from: Mapping[str, str], own: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a run's process: inherited variables of `inherited_from`, then `own`, then secrets.

    PENSTOCK_SECRETS lists the names of the secrets.
    """
    inherited = {name: value for name, value in inherited_from.items() if name in INHERITED_VARIABLES or name.startswith("LC_")}
    added = {"PYTHONUNBUFFERED": "1"} | ({"PENSTOCK_SECRETS": ",".join(sorted(secrets))} if secrets else {})
    return inherited | dict(own) | added | dict(secrets)
