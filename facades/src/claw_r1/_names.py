"""A module's names, imported when they are asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(module: str, homes: Mapping[str, str], absent: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A `__getattr__` for `module`: `homes` says as `module:name` where each is found, `absent` what to use in place of others."""

    def find(name: str) -> Any:
        if name in homes:
            home, _, original = homes[name].partition(":")
            return getattr(import_module(home), original or name)
        instead = f"; {absent[name]}" if absent and name in absent else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{instead}")

    return find
