"""Penstock makes any agent trainable: run it over a dataset, record every model call token by token, grade, improve the policy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.sdk.context import AgentWorkflowContext, GraderContext
    from penstock.sdk.routing import RolloutContext, SampleSource, get_rollout_context
    from penstock.sdk.samples import RolloutSample
    from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig, BaseConfig, ConcurrencyConfig, Grader, GraderConfig

__version__ = "0.1.0"

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
    "get_rollout_context",
]

_HOMES = {
    "context": ("AgentWorkflowContext", "GraderContext"),
    "routing": ("RolloutContext", "SampleSource", "get_rollout_context"),
    "samples": ("RolloutSample",),
    "workflow": ("AgentWorkflow", "AgentWorkflowConfig", "BaseConfig", "ConcurrencyConfig", "Grader", "GraderConfig"),
}


def __getattr__(name: str) -> Any:
    """Import what an author asks for, when it is asked for: `penstock --help` needs none of it."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"penstock.sdk.{module}"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
