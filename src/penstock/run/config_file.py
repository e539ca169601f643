"""Loads a run's config file. Other wheels may add file formats.

A file with a table that a run config lacks may be in a format of another wheel: the table's name is looked up among the entry
points of the group `penstock.config_format`, and the `ConfigReader` found there makes the run config.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from penstock.config import RunConfig, RunKind, load_config, read_toml
from penstock.errors import ConfigError
from penstock.registry import Registry
from penstock.run.inputs import refuse_untrainable


class ConfigReader(Protocol):
    def __call__(self, file: Path, overrides: Iterable[str], kind: RunKind, *, warn: Callable[[str], None]) -> RunConfig: ...


CONFIG_FORMATS = Registry("config format", {})


def _ignore_warning(line: str) -> None:
    pass


def load_run_config(
    file: Path, overrides: Iterable[str], kind: RunKind, *, warn: Callable[[str], None] = _ignore_warning
) -> RunConfig:
    """Reads `file`, applies overrides of run config keys and checks everything; calls `warn` for keys without an effect."""
    tables = read_toml(file)
    for name in tables:
        if name not in RunConfig.model_fields and name in CONFIG_FORMATS:
            reader: ConfigReader = CONFIG_FORMATS.load(name)
            return reader(file, overrides, kind, warn=warn)
    if "experiment" in tables:
        raise ConfigError(f"{file} is an experiment file, which needs the package penstock-controller; install it")
    config = load_config(file, overrides)
    check_kind(config, kind)
    return config


def check_kind(config: RunConfig, kind: RunKind) -> None:
    """Raises ConfigError if the engine cannot do a run of this kind."""
    if kind == "train":
        refuse_untrainable(config)
