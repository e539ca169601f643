"""Parses Hydra overrides such as `a.b=1`, `+a.b=[x,y]` and `a.b='text'`."""

import re
from collections.abc import Iterable
from typing import Any

import yaml

from claw_r1.keys import ALIASES
from penstock.errors import ConfigError

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
