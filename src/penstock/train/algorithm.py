"""The algorithm of a run: its advantage and its loss, each with its own settings, and the mean that the loss is."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from penstock.config import RunConfig, TrainSection, validate
from penstock.errors import ConfigError, Problems
from penstock.registry import Registry
from penstock.train.advantages import ADVANTAGES
from penstock.train.advantages.base import AlgorithmFunction, Mean, described
from penstock.train.losses import LOSSES

Advantage = AlgorithmFunction
"""With its settings bound: takes one group, or what its level says, and returns credit."""

CONSTANT = 128.0
"""Tokens that a rollout's loss is divided by where `train.mean` is `constant`, so that long replies are not discounted. It sets the
scale of the loss: near the tokens of a usual rollout, the gradient clip means the same as for a mean over the rollout."""
OF_CLIP = ("clip_low", "clip_high", "importance_cap")
"""Keys of `[train]` that a loss reads only if it takes the whole section."""


def load_advantage(section: TrainSection) -> Advantage:
    """Returns the advantage that the section names. ConfigError if it has no such settings."""
    return _bind(ADVANTAGES, section.advantage, section.advantage_settings, section)


def load_loss(section: TrainSection) -> AlgorithmFunction:
    """Returns the loss that the section names. ConfigError if it has no such settings, or would ignore some of `[train]`."""
    function = LOSSES.load(section.loss)
    if _settings_class(function) is not TrainSection:
        for key in OF_CLIP:
            if _is_set(section, key):
                raise ConfigError(
                    f"train.{key} is a setting of train.loss = 'clip'; the settings of {section.loss!r} are in "
                    "[train.loss_settings], see docs/algorithms.md"
                )
    return _bind(LOSSES, section.loss, section.loss_settings, section)


def check_algorithm(config: RunConfig, problems: Problems) -> None:
    """Note names and settings that there are not. Only settings are worth the import of torch here."""
    section = config.train
    with problems.noting("train.advantage"):
        ADVANTAGES.check(section.advantage)
        if section.advantage_settings:
            load_advantage(section)
    with problems.noting("train.loss"):
        LOSSES.check(section.loss)
        if section.loss_settings or any(_is_set(section, key) for key in OF_CLIP):
            load_loss(section)
    with problems.noting("train.optimizer"):
        if section.optimizer_settings or _is_set(section, "optimizer"):
            from penstock.train.optim import refuse_optimizer

            refuse_optimizer(section)


def refuse_branches(config: RunConfig) -> None:
    """Raises ConfigError if the advantage needs branches and there are none, or none does and there are some."""
    name, needed = config.train.advantage, "branches" in load_advantage(config.train).needs
    if needed and not config.rollout.branches:
        raise ConfigError(f"train.advantage = {name!r} compares continuations; set rollout.branches to how many, such as 4")
    if config.rollout.branches and not needed:
        raise ConfigError(f"train.advantage = {name!r} has no use for rollout.branches; leave it out, or take 'vine'")
    if needed and config.train.kl and config.train.kl_in == "reward":
        text = "takes the divergence off the rewards of rollouts alone, which are compared with their continuations'"
        raise ConfigError(f"train.kl_in = 'reward' {text}; set train.kl_in = 'loss'")


def settings_of(function: Callable[..., Any]) -> type[BaseModel] | None:
    """Returns the class of a function's own settings; None if it has none."""
    found = _settings_class(function)
    return None if found is TrainSection else found


def mean_of(section: TrainSection) -> Mean:
    """Returns what the loss is a mean over; `auto` is what the paper of the loss has, else that of the advantage."""
    if section.mean != "auto":
        return section.mean
    loss, advantage = described(LOSSES.load(section.loss)), described(ADVANTAGES.load(section.advantage))
    return loss.mean or advantage.mean or "rollout"


def _bind(registry: Registry, name: str, given: dict[str, Any], section: TrainSection) -> AlgorithmFunction:
    function, table = described(registry.load(name)), f"train.{registry.kind}_settings"
    kind = _settings_class(function)
    if given and (kind is None or kind is TrainSection):
        own = "" if kind is None else f": its keys are those of [train], such as train.{OF_CLIP[0]}"
        raise ConfigError(f"[{table}]: the {registry.kind} {name!r} has no settings{own}; leave the table out")
    if kind is None:
        return function
    settings = section if kind is TrainSection else validate(kind, given, f"[{table}] of {name!r}")
    return replace(function, settings=settings)


def _is_set(section: TrainSection, key: str) -> bool:
    return getattr(section, key) != TrainSection.model_fields[key].default


def _settings_class(function: Callable[..., Any]) -> type[BaseModel] | None:
    """Returns what the second parameter is annotated with; `TrainSection` if it is not, None if there is no second one."""
    try:
        parameters = list(inspect.signature(described(function).function, eval_str=True).parameters.values())
    except (ValueError, NameError, TypeError):  # of a compiled function, or annotated with what cannot be imported
        return None
    needed = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(needed) < 2:
        return None
    kind = needed[1].annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return TrainSection if needed[1].default is inspect.Parameter.empty else None
