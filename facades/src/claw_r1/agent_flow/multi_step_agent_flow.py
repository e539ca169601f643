"""A flow of several turns, with tools or self-review."""

from penstock.sdk.flow import MultiStepAgentFlow

__all__ = ["MultiStepAgentFlow"]
