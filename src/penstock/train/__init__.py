"""The trainer: from complete groups to the next policy version. Calling this package is `penstock.train(...)`."""

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Makes `penstock.train` both this package and the function: importing a submodule binds the name to the package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function())


def _function() -> Any:
    return importlib.import_module("penstock.api").train  # a layer above, imported when called


sys.modules[__name__].__class__ = _CallablePackage
