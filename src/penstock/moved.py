"""Import paths of modules that moved, within this wheel or to another one.

Another wheel lists them in the entry-point group `penstock.module`, such as `"penstock.sdk.flow" = "penstock_compat.flow"`. The
old path and every path below it then import the module at the new place.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

WHEELS: dict[str, str] = dict.fromkeys(
    (
        "penstock.graders.function",
        "penstock.graders.gsm8k",
        "penstock.graders.rule",
        "penstock.integrations.gsm8k",
        "penstock.rollout.server",
        "penstock.sdk.flow",
        "penstock.sdk.flows",
    ),
    "penstock-compat",
)
"""The wheel that each old path moved to."""
HERE = {
    "penstock.trackers": "penstock.run.trackers",
    "penstock.train.losses.dapo": "penstock.train.losses.clip",
    "penstock.train.means": "penstock.train.advantages.base",
}
"""Paths that changed within this wheel."""


class MovedModules:
    """Finds modules by their old path. It comes first: below a moved package, Python would import a second copy."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("penstock."):
            return None
        old = next((old for old in (*WHEELS, *HERE) if name == old or name.startswith(f"{old}.")), None)
        if old is None:
            return None
        if old in HERE:
            return ModuleSpec(name, cast("Any", _Alias(HERE[old] + name.removeprefix(old))))
        from importlib.metadata import entry_points  # takes 10 ms, which most programs need not spend

        new = next((point.value for point in entry_points(group="penstock.module", name=old)), None)
        if new is None:
            text = f"{name} is part of the wheel {WHEELS[old]}, which is not installed; install it from packages/ of the repository"
            raise ModuleNotFoundError(text, name=name)
        return ModuleSpec(name, cast("Any", _Alias(new + name.removeprefix(old))))


class _Alias:
    """Loads a module by importing the one at its new place."""

    def __init__(self, new: str) -> None:
        self._new = new
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it


def install() -> None:
    """Lets this process import moved modules by their old paths."""
    if MovedModules not in sys.meta_path:
        sys.meta_path.insert(0, MovedModules)
