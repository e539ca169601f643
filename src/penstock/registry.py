"""Lazy registries: a name maps to an import path, which is imported on first use."""

import difflib
import importlib
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from penstock.errors import ConfigError, boundary


class Registry:
    """One table of a kind of thing ("advantage", "engine", …).

    A name is looked up in the table, then among the entry points of the group `penstock.<kind>` (`penstock.tool_format`: spaces
    become underscores); `module:attr` names anything. Iteration gives the table's names, then those of the entry points.
    """

    def __init__(
        self, kind: str, table: dict[str, str], *, base: type | None = None, wheels: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.table = table
        self._base = base
        """Every entry must be a subclass of it; None takes anything."""
        self._wheels = wheels or {}
        """Names of entries that another of our wheels has, for the error where it is not installed."""

    def __iter__(self) -> Iterator[str]:
        return iter([*self.table, *(name for name in self._plugins() if name not in self.table)])

    def __contains__(self, name: str) -> bool:
        return name in self.table or (bool(name) and name in self._plugins())

    def load(self, name: str) -> Any:
        """Import and return the object that `name` stands for."""
        target = self._target(name)
        module, _, attribute = target.partition(":")
        what = f"{self.kind} {name!r} cannot be loaded from {target!r}"
        try:
            with boundary(ConfigError, what):
                found = getattr(importlib.import_module(module), attribute)
        except ConfigError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                raise ConfigError(f"{error}; `penstock doctor` says how to install what is missing") from error
            raise
        if self._base and not (isinstance(found, type) and issubclass(found, self._base)):
            base = f"{self._base.__module__}.{self._base.__name__}"
            raise ConfigError(f"{self.kind} {name!r}: {target!r} is no class that derives from {base}; see docs/extending.md")
        return found

    def check(self, name: str) -> None:
        """ConfigError if the name is unknown. Imports nothing, so it can run before heavy work."""
        self._target(name)

    def _target(self, name: str) -> str:
        target = name if ":" in name else self.table.get(name) or self._plugins().get(name)
        if target is None and name in self._wheels:
            text = f"{self.kind} {name!r} is part of the wheel {self._wheels[name]}, which is not installed"
            raise ConfigError(f"{text}; install it from packages/ of the repository")
        if target is None:
            raise ConfigError(f"unknown {self.kind} {name!r}; {self._hint(name)}")
        return target

    def _plugins(self) -> dict[str, str]:
        return _entry_points(f"penstock.{self.kind.replace(' ', '_')}", tuple(sys.path))

    def _hint(self, name: str) -> str:
        known = sorted({*self.table, *self._plugins()})
        near = difflib.get_close_matches(name, known, n=1)
        return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}, or module:attr"


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, str]:
    """Returns the entry points of a group, by name. Reading the packages of `path` (`sys.path`) takes 10 ms."""
    return {point.name: point.value for point in entry_points(group=group)}
