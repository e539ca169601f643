"""A flow of one prompt and one reply."""

from penstock.sdk.flow import SingleStepSingleTurnAgentFlow

__all__ = ["SingleStepSingleTurnAgentFlow"]
