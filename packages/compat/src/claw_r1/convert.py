"""Reads Hydra overrides and converts Claw-R1 keys to Penstock settings.

Unsupported keys raise ConfigError; keys without effect give a notice.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from claw_r1.keys import ACTOR, ALIASES, COMBINED_KEYS, FIXED_KEYS, FLOW, IGNORED_KEYS, MAPPED_KEYS, ROLLOUT, Values
from penstock.errors import ConfigError


class Converted(NamedTuple):
    settings: dict[str, Any]
    """Values by dotted Penstock key. Keys without a value are left out."""
    config: dict[str, Any]
    """All Claw-R1 keys as a tree, which a flow reads as `self.config`."""
    notices: list[str]
    """Keys that have no effect, with the reason."""
    epochs: int | None
    """Passes over the tasks. None if the number of steps is given."""
    fresh: bool
    """Whether to start over instead of resuming the run."""


def convert(values: Values, *, is_async: bool = True) -> Converted:
    """Converts `values`. Raises ConfigError for the first key that is unknown or not supported."""
    idle: defaultdict[str, list[str]] = defaultdict(list)
    tree: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith(PENSTOCK_PREFIX):
            continue
        put(tree, key, value)
        if key not in MAPPED_KEYS and key not in COMBINED_KEYS and not _is_kept(key, value):
            idle[_reason(key)].append(key)
    settings = {MAPPED_KEYS[key].ours: MAPPED_KEYS[key].read(value) for key, value in values.items() if key in MAPPED_KEYS}
    for part in (_advantage, _penalty, _clip, _evaluation, _queue, _place):
        settings |= part(values)
    settings["rollout.max_staleness"] = _staleness(values, is_async=is_async)
    settings |= {key.removeprefix(PENSTOCK_PREFIX): value for key, value in values.items() if key.startswith(PENSTOCK_PREFIX)}
    settings.setdefault("train.steps", values.get("rollout.total_rollout_steps"))
    if settings.get("scale.name") == "none" and settings.pop("executor.workers", None) is not None:
        idle["there are no workers in one process"].append(f"{FLOW}.num_workers")
    return Converted(
        settings={key: value for key, value in settings.items() if value is not None},
        config=tree,
        notices=[f"no effect here: {', '.join(keys)} ({reason})" for reason, keys in idle.items()],
        epochs=_epochs(values) if settings["train.steps"] is None else None,
        fresh=_one_of(values, "trainer.resume_mode", {"auto": False, "disable": True, None: False}),
    )


def _is_kept(key: str, value: Any) -> bool:
    """Returns whether the key is fixed. Raises ConfigError if its value is not one of the accepted values."""
    if (rule := FIXED_KEYS.get(key)) is None:
        return False
    if value not in rule.values:
        kept = " or ".join(str(each) for each in rule.values)
        raise ConfigError(f"{key}={value}: {rule.reason}; leave it out, or set it to {kept}")
    return True


def _reason(key: str) -> str:
    for reason, patterns in IGNORED_KEYS.items():
        if any(key == each or (each.endswith("*") and key.startswith(each[:-1])) for each in patterns):
            return reason
    known = [
        *MAPPED_KEYS,
        *COMBINED_KEYS,
        *FIXED_KEYS,
        *ALIASES,
        *(each for patterns in IGNORED_KEYS.values() for each in patterns if "*" not in each),
    ]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else "see docs/claw-r1.md for all keys"
    raise ConfigError(f"unknown key {key!r}; {hint} Settings of Penstock itself begin with penstock., such as penstock.train.lr")


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key in a nested dict."""
    *sections, last = key.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{key}: {section!r} has a value already, and cannot have keys below it")
        tree = below  # pyright: ignore[reportUnknownVariableType]
    tree[last] = value


def _one_of(values: Values, key: str, known: dict[Any, Any]) -> Any:
    value = values.get(key, next(iter(known)))
    if value in known:
        return known[value]
    raise ConfigError(f"{key}={value}: not here; use {' or '.join(str(each) for each in known if each is not None)}")


def _advantage(values: Values) -> Values:
    plain = values.get("algorithm.norm_adv_by_std_in_grpo") is False
    return {"train.advantage": _one_of(values, "algorithm.adv_estimator", {"grpo": "dr_grpo" if plain else "grpo"})}


def _penalty(values: Values) -> Values:
    weight = values.get(f"{ACTOR}.kl_loss_coef", 0.001)
    return {"train.kl": weight if values.get(f"{ACTOR}.use_kl_loss") else 0.0}


def _clip(values: Values) -> Values:
    if (both := values.get(f"{ACTOR}.clip_ratio")) is None:
        return {}
    return {f"train.clip_{end}": values.get(f"{ACTOR}.clip_ratio_{end}", both) for end in ("low", "high")}


def _evaluation(values: Values) -> Values:
    greedy = values.get(f"{ROLLOUT}.val_kwargs.do_sample") is False
    return {"sampling.eval_temperature": 0.0 if greedy else values.get(f"{ROLLOUT}.val_kwargs.temperature")}


def _queue(values: Values) -> Values:
    most = values.get("async_training.max_queue_size")
    return {} if most is None else {"rollout.max_waiting": most, "rollout.overflow": "drop"}


def _staleness(values: Values, *, is_async: bool) -> int:
    if not is_async:
        if present := [name for name in _ASYNC if f"async_training.{name}" in values]:
            raise ConfigError(f"async_training.{present[0]}: claw_r1.main_agent_ppo is synchronous; run claw_r1.async_main")
        return 0
    steps, share = (values.get(f"async_training.{name}", default) for name, default in _ASYNC.items())
    for name, value in zip(_ASYNC, (steps, share), strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"async_training.{name}={value}: give a number, 0 or more")
    return max(0, ceil(steps) - 1 + ceil(steps * share))


_ASYNC = {"trigger_parameter_sync_step": 4, "staleness_threshold": 0.1}


def _place(values: Values) -> Values:
    project, name = (values.get(f"trainer.{key}") for key in ("project_name", "experiment_name"))
    if folder := values.get("trainer.default_local_dir"):
        return {"run.folder": str(Path(str(folder)).parent), "run.name": Path(str(folder)).name}
    return {"run.folder": str(Path("runs", str(project))) if project else None, "run.name": name}


def _epochs(values: Values) -> int | None:
    return values.get("trainer.total_epochs", values.get("rollout.total_epochs"))


# Overrides, such as `a.b=1`, `+a.b=[x,y]` and `a.b='text'`


PENSTOCK_PREFIX = "penstock."
"""Keys with this prefix are Penstock settings, as in `penstock train --set`."""
KEY = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:[./@][A-Za-z_][\w-]*)*)=(.*)", re.DOTALL)
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d+)(e[+-]?\d+)?|[+-]?inf|nan", re.IGNORECASE)


def read_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Returns the values by key; the last value of a key wins. Raises ConfigError for an argument that is not an override."""
    values: dict[str, Any] = {}
    for argument in arguments:
        found = KEY.fullmatch(argument)
        if found is None:
            raise ConfigError(f"{argument!r}: {_remedy(argument)}")
        key, text = found[1], found[2]
        if "${" in text:
            raise ConfigError(f"{argument!r}: interpolations are not resolved; write the value itself")
        values[ALIASES.get(key, key)] = read_value(text, key)
    return values


def read_value(text: str, key: str) -> Any:
    """Parses quoted text, a list, a mapping, null, a boolean or a number. Returns anything else unchanged."""
    text = text.strip()
    if text[:1] in ("[", "{", "'", '"'):
        try:
            return _plain(yaml.safe_load(re.sub(r"(?<=[{,])(\s*\w+):(?=\S)", r"\1: ", text) if text[0] == "{" else text))
        except yaml.YAMLError as cause:
            raise ConfigError(f"{key}={text}: neither a list, a mapping nor quoted text; close what is open") from cause
    return _plain(text)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "null": None, "": None}
    if value.lower() in words or value == "None":
        return words.get(value.lower())
    if not NUMBER.fullmatch(value):
        return value
    return int(value) if value.lstrip("+-").replace("_", "").isdigit() else float(value)


def _remedy(argument: str) -> str:
    if argument.startswith("~"):
        return "keys cannot be taken away; give those that are to be set"
    if argument.startswith("-"):
        return "there are no flags here, and no config files of Hydra are read; give keys, such as trainer.total_training_steps=10"
    return "write it as key=value, for example trainer.total_training_steps=10"
