"""The Osmosis rollout API over Penstock: names and conversions only."""

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__"]

_NOT_YET = frozenset({"MissingAPIKeyError", "ModelNotFoundError", "ProviderRequestError", "RubricResult", "evaluate_rubric"})


def __getattr__(name: str) -> Any:
    """Say of what upstream offers here that it is not there yet; nothing is imported."""
    if name in _NOT_YET:
        raise AttributeError(f"osmosis_ai.{name} is not in this release of penstock-facades; write a Grader that asks your judge")
    raise AttributeError(f"module 'osmosis_ai' has no attribute {name!r}")
