"""Lazy imports of a module's names."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(module: str, homes: Mapping[str, str], absent: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Returns a `__getattr__` for `module`.

    `homes` maps a name to `module` or `module:name`. `absent` maps a name that is not offered to a hint for the error message.
    """

    def find(name: str) -> Any:
        if name in homes:
            home, _, original = homes[name].partition(":")
            return getattr(import_module(home), original or name)
        instead = f"; {absent[name]}" if absent and name in absent else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{instead}")

    return find
