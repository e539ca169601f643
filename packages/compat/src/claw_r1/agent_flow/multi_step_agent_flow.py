"""A flow of several turns, with tools or self-review."""

from penstock_compat.flow import MultiStepAgentFlow

__all__ = ["MultiStepAgentFlow"]
