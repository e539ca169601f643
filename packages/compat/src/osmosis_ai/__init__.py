"""The Osmosis rollout API on Penstock. It contains names and conversions only."""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__"]

_RUBRIC = frozenset({"MissingAPIKeyError", "ModelNotFoundError", "ProviderRequestError", "RubricResult", "evaluate_rubric"})


def __getattr__(name: str) -> Any:
    """Imports the rubric names on first use."""
    if name in _RUBRIC:
        return getattr(importlib.import_module("osmosis_ai.rubric"), name)
    raise AttributeError(f"module 'osmosis_ai' has no attribute {name!r}")
