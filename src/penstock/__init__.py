"""Penstock makes any agent trainable: run it over a dataset, record every model call token by token, grade, improve the policy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock import moved

if TYPE_CHECKING:
    from penstock.api import evaluate, load_run, train
    from penstock.sdk.context import AgentWorkflowContext, GraderContext
    from penstock.sdk.routing import RolloutContext, SampleSource, get_rollout_context
    from penstock.sdk.samples import RolloutSample
    from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig, BaseConfig, ConcurrencyConfig, Grader, GraderConfig

__version__ = "0.1.0"

moved.install()

__all__ = [
    "AgentWorkflow",
    "AgentWorkflowConfig",
    "AgentWorkflowContext",
    "BaseConfig",
    "ConcurrencyConfig",
    "Grader",
    "GraderConfig",
    "GraderContext",
    "RolloutContext",
    "RolloutSample",
    "SampleSource",
    "evaluate",
    "get_rollout_context",
    "load_run",
    "train",
]

_HOMES = {
    "api": ("evaluate", "load_run"),
    "sdk.context": ("AgentWorkflowContext", "GraderContext"),
    "sdk.routing": ("RolloutContext", "SampleSource", "get_rollout_context"),
    "sdk.samples": ("RolloutSample",),
    "sdk.workflow": ("AgentWorkflow", "AgentWorkflowConfig", "BaseConfig", "ConcurrencyConfig", "Grader", "GraderConfig"),
}


def __getattr__(name: str) -> Any:
    """Imports public names on first use: `penstock --help` needs none of them."""
    if name == "train":  # the package can be called
        return import_module("penstock.train")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"penstock.{module}"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
