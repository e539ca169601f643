"""Several turns, with tools or a second look."""

from penstock.sdk.flow import MultiStepAgentFlow

__all__ = ["MultiStepAgentFlow"]
