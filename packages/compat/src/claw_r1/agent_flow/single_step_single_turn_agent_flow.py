"""A flow of one prompt and one reply."""

from penstock_compat.flow import SingleStepSingleTurnAgentFlow

__all__ = ["SingleStepSingleTurnAgentFlow"]
