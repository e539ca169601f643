"""Lazy imports of a module's names."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for `module`. `homes` maps each name to the module that defines it."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find
