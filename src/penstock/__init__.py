"""Penstock makes any agent trainable: run it over a dataset, record every model call token by token, grade, improve the policy."""

from penstock.sdk.context import AgentWorkflowContext, GraderContext, RolloutContext, get_rollout_context
from penstock.sdk.grader import Grader, GraderConfig
from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig, BaseConfig, ConcurrencyConfig

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
    "get_rollout_context",
]
