"""AgentWorkflow: what an author subclasses."""

from penstock.sdk.workflow import AgentWorkflow

__all__ = ["AgentWorkflow"]
