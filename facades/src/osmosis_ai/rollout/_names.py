"""A module's names, imported when they are asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `module`: each of its names is found in the module that `homes` gives for it."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find
