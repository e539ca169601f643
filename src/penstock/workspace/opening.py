"""Loads a run config from a file: a run config itself, or an experiment file of a workspace."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.config import RunConfig, load_config, make_config, override, read_toml
from penstock.errors import Issue, Problems, combine_issues
from penstock.run.inputs import refuse_untrainable
from penstock.sdk.dataset import count_rows
from penstock.workspace.experiment import Experiment, is_experiment, read_experiment
from penstock.workspace.layout import workspace_of
from penstock.workspace.sections import RunKind


def _ignore_warning(line: str) -> None:
    pass


def load_run_config(
    file: Path, overrides: Iterable[str], kind: RunKind, *, warn: Callable[[str], None] = _ignore_warning
) -> RunConfig:
    """Reads `file`, applies overrides of run config keys and checks everything; calls `warn` for keys without an effect.

    Sets the variables under `[env]` of an experiment in this process, for its agent.
    """
    tables = read_toml(file)
    if not is_experiment(tables):
        config = load_config(file, overrides)
        check_kind(config, kind)
        return config
    experiment = read_experiment(tables, kind, str(file))
    workspace = workspace_of(file.parent)
    problems, config = Problems(), None
    with problems.noting("secrets.required"):
        _check_secrets(experiment, str(file))
    with problems.noting("experiment.dataset"):
        dataset = workspace.dataset(experiment.dataset)
        tree = experiment.run_config(code=workspace.path, dataset=dataset, rows=count_rows(dataset))
        tree["run"] = {"name": file.stem, "folder": str(workspace.path / "runs"), **experiment.advanced.get("run", {})}
        override(tree, overrides)
        if kind == "eval" and isinstance(samples := tree["eval"].get("samples"), int):
            tree["eval"]["k"] = [k for k in tree["eval"]["k"] if k <= samples]  # an override may have reduced the samples
        config = make_config(tree, str(file))
        check_kind(config, kind)
    problems.refuse(str(file))
    assert config is not None  # else that has raised
    for warning in experiment.warnings:
        warn(f"{file}: {warning.line}")
    os.environ.update(experiment.env)
    return config


def check_kind(config: RunConfig, kind: RunKind) -> None:
    """Raises ConfigError if the engine cannot do a run of this kind."""
    if kind == "train":
        refuse_untrainable(config)


def _check_secrets(experiment: Experiment, where: str) -> None:
    missing = [name for name in experiment.secrets if not os.environ.get(name)]
    if missing:
        text = "the environment has none; set it, or keep it with `penstock secret set` and submit the run"
        raise combine_issues(where, [Issue("secrets.required", f"{name}: {text}") for name in missing])
