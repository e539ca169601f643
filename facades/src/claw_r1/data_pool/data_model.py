"""One model call, as a flow hands it in."""

from penstock.sdk.flow_step import SubmittedStep as Step

__all__ = ["Step"]
