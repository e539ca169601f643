"""What a keeper starts, in which environment, and how that ended: the two small files between a controller and its keepers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

import orjson

from penstock.controller.runs import RunFiles, now
from penstock.system.files import write_file

INHERITED_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH",
    "PENSTOCK_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
"""Variables of the controller's own environment that a run may see, besides `LC_…`: where things are, never who may use them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """A process to keep. No secret is in it."""

    argv: list[str]
    """The interpreter first; another takes its place where the project needs one of its own."""
    cwd: str
    env: dict[str, str] = field(default_factory=dict[str, str])
    stop_grace_s: float = 60.0
    """From being asked to end to being killed."""
    project: str = ""
    """Folder whose pyproject.toml says what must be installed; empty where there is none."""
    environments: str = ""
    """Where environments are kept."""
    log_mb: float = 256.0
    """Of the log; what is said beyond is left out."""

    @classmethod
    def read(cls, files: RunFiles) -> Self:
        """The one that a run was laid out with."""
        return cls(**orjson.loads(files.job.read_bytes()))

    def write(self, files: RunFiles) -> None:
        write_file(files.job, orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How a run's process ended."""

    code: int
    """Its exit code; negative is the signal that ended it."""
    stopped: bool
    """Whether it was asked to."""
    message: str = ""
    """Why it failed: the last thing it said that looks like a reason. Empty where it did not, or was asked to end."""
    ended_at: str = field(default_factory=now)

    @classmethod
    def read(cls, files: RunFiles) -> Self | None:
        """None where it has not ended."""
        try:
            return cls(**orjson.loads(files.end.read_bytes()))
        except FileNotFoundError:
            return None

    def write(self, files: RunFiles) -> None:
        """From here on the run is over."""
        write_file(files.end, orjson.dumps(asdict(self)))


def process_environment(outside: Mapping[str, str], own: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """What the run's process sees: a few variables of `outside`, then `own`, then secrets, whose names it is told."""
    kept = {name: value for name, value in outside.items() if name in INHERITED_VARIABLES or name.startswith("LC_")}
    told = {"PYTHONUNBUFFERED": "1"} | ({"PENSTOCK_SECRETS": ",".join(sorted(secrets))} if secrets else {})
    return kept | dict(own) | told | dict(secrets)
