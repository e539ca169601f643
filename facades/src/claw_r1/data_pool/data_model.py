"""One model call, as a flow hands it in."""

from penstock.sdk.flows.step import SubmittedStep as Step

__all__ = ["Step"]
