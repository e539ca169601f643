"""The base class of workflows."""

from penstock.sdk.workflow import AgentWorkflow

__all__ = ["AgentWorkflow"]
