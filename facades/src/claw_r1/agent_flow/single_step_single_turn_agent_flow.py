"""One question, one reply."""

from penstock.sdk.flow import SingleStepSingleTurnAgentFlow

__all__ = ["SingleStepSingleTurnAgentFlow"]
